"""An LMCache engine in one process, as vLLM would have it, with KV in plain memory in place of a GPU's.

argv: store or load, URL of the remote store, seed, chunks, JSON of extra_config. Prints one JSON object:
store: {"tokens", "puts": chunks handed over, "found": tokens that a lookup finds after, "sha256" of the KV};
load: {"tokens", "found", "retrieved", "sha256" of the KV that came, "wanted" of what the seed makes}.
Everything else goes to standard error.
"""
import contextlib
import hashlib
import json
import os
import random
import sys
import threading

import torch_shim  # noqa: F401, before lmcache

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE, CHUNK = 8, 4, 64, 64  # 512 KiB a chunk in float16
PLAIN = ("redis://", "unix://")


class PlainMemory(GPUConnectorInterface):
    """Moves chunks to and from kv, a tensor of [2, layers, tokens, hidden]."""

    def __init__(self, kv):
        self.kv = kv

    def get_shape(self, num_tokens):
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD_SIZE])

    def from_gpu(self, memory_obj, start, end, **_):
        memory_obj.tensor.copy_(self.kv[:, :, start:end])

    def to_gpu(self, memory_obj, start, end, **_):
        self.kv[:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs, starts, ends, **_):
        for m, start, end in zip(memory_objs, starts, ends):
            self.from_gpu(m, start, end)

    def batched_to_gpu(self, memory_objs, starts, ends, **_):
        for m, start, end in zip(memory_objs, starts, ends):
            self.to_gpu(m, start, end)


def bytes_of(kv):
    return bytes(kv.contiguous().view(-1).view(torch.uint8).numpy())


def digest(kv):
    return hashlib.sha256(bytes_of(kv)).hexdigest()


def build(url, kv, extra):
    plain = url.startswith(PLAIN)
    if not plain:
        extra = {"save_chunk_meta": False, **extra}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.1, remote_url=url, remote_serde="naive",
        save_unfull_chunk=plain, extra_config=extra,
    )
    metadata = LMCacheMetadata(
        model_name="acme/tiny", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.float16, kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD_SIZE), chunk_size=CHUNK,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "engine", config, metadata, PlainMemory(kv), mock_up_broadcast_fn, mock_up_broadcast_object_fn
    )
    engine.post_init()
    return engine


class Puts:
    """Counts what an engine hands to its remote store, by the callback that the store offers for it."""

    def __init__(self, engine):
        self.begun, self.ended, self.change = 0, 0, threading.Condition()
        (remote,) = [b for b in engine.storage_manager.storage_backends.values() if hasattr(b, "put_tasks")]
        submit = remote.batched_submit_put_task

        def counted(keys, memory_objs, **options):
            with self.change:
                self.begun += len(keys)
            submit(keys, memory_objs, **{**options, "on_complete_callback": self.end})

        remote.batched_submit_put_task = counted

    def end(self, key):
        with self.change:
            self.ended += 1
            self.change.notify_all()

    def wait(self):
        with self.change:
            self.change.wait_for(lambda: self.ended == self.begun)
            return self.begun


def run(mode, url, seed, chunks, extra):
    # Some URLs keep the last chunk too, which is no full one.
    tokens = chunks * CHUNK + (5 if url.startswith(PLAIN) else 0)
    ids = torch.tensor([random.Random(f"{seed} {i}").randrange(32000) for i in range(tokens)])
    size = 2 * LAYERS * tokens * HEADS * HEAD_SIZE
    made = torch.frombuffer(bytearray(random.Random(seed).randbytes(2 * size)), dtype=torch.float16)
    made = made.view(2, LAYERS, tokens, HEADS * HEAD_SIZE)
    if mode == "store":
        engine = build(url, made.clone(), extra)
        puts = Puts(engine)
        engine.store(ids)
        return {"tokens": tokens, "puts": puts.wait(), "found": engine.lookup(ids), "sha256": digest(made)}
    kv = torch.zeros_like(made)
    engine = build(url, kv, extra)
    found = engine.lookup(ids)
    retrieved = int(engine.retrieve(ids).sum())
    return {"tokens": tokens, "found": found, "retrieved": retrieved, "sha256": digest(kv), "wanted": digest(made)}


if __name__ == "__main__":
    out = os.dup(1)
    with contextlib.redirect_stdout(sys.stderr):
        mode, url, seed, chunks, extra = sys.argv[1:6]
        result = run(mode, url, int(seed), int(chunks), json.loads(extra))
    os.write(out, json.dumps(result).encode())
    # Its clients have threads that do not end by themselves.
    os._exit(0)
