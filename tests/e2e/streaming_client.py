"""A client process to be killed: `python streaming_client.py ADDRESS REQUEST_ID PROMPT_LEN` says "token" for each."""

import asyncio
import sys

from kvplane_client import AsyncClient


async def main(address: str, request_id: str, prompt_len: int) -> None:
    async with AsyncClient(address) as client:
        print("started", flush=True)
        stream = client.stream(
            [7, *range(1, prompt_len)], request_id=request_id, max_tokens=1000, temperature=0.0, cache_salt=request_id
        )
        async for _ in stream:
            print("token", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
