"""Sends requests with the functions of `vllm bench serve` and prints what each
made of the answer: vllm_bench.py BASE_URL JSON-LIST of {kind, path, model, n}."""

import asyncio
import dataclasses
import json
import sys

import aiohttp
from vllm_bench_requests import ASYNC_REQUEST_FUNCS, RequestFuncInput


async def main(base, calls):
    results = []
    async with aiohttp.ClientSession(trust_env=False) as session:
        for call in calls:
            def one(i):
                return ASYNC_REQUEST_FUNCS[call["kind"]](RequestFuncInput(
                    prompt=f"request {i} of {call['kind']}: which node keeps the block, and for how long?",
                    api_url=base + call["path"], prompt_len=20, output_len=16, model=call["model"], ignore_eos=True,
                    request_id=f"bench-{call['kind']}-{i}",
                    extra_headers={"x-request-id": f"bench-{call['kind']}-{i}"}), session)
            outputs = await asyncio.gather(*(one(i) for i in range(call["n"])))
            results.append([dataclasses.asdict(o) for o in outputs])
    print(json.dumps(results))


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
