"""A peer of `bench_serve`: `transformers.generate`, one JSON line per batch on stdin and stdout.

python -m benchmarks.transformers_worker MODEL DTYPE THREADS
"""

from __future__ import annotations

import json
import sys
import time

import torch

from executor_service.model_loader import load_model


def main() -> None:
    """Load the model and answer until stdin ends."""
    source, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = load_model(source, dtype=dtype, device=torch.device("cpu")).model
    model.set_attn_implementation("sdpa")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        input_ids = torch.tensor(request["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            generated = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                min_new_tokens=request["output"],
                max_new_tokens=request["output"],
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        if generated.shape[1] != input_ids.shape[1] + request["output"]:
            raise RuntimeError(f"expected {request['output']} new tokens, got shape {tuple(generated.shape)}")
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
