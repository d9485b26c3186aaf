"""Calls huggingface_hub as a user would. argv: name of a call, its keyword arguments as JSON.

Prints one JSON object: {"ok": value} or {"error": class, "classes": [...], "message": text}.
"""
import hashlib
import json
import os
import sys

import huggingface_hub as hub
from huggingface_hub import constants


def metadata(repo_id, revision=None):
    m = hub.get_safetensors_metadata(repo_id, revision=revision)
    return {
        "sharded": m.sharded,
        "tensors": len(m.weight_map),
        "files": sorted(m.files_metadata),
        "parameters": m.parameter_count,
    }


def list_files(repo_id, revision=None):
    api = hub.HfApi()
    info = api.model_info(repo_id, revision=revision, files_metadata=True)
    return {
        "commit": info.sha,
        "files": {
            s.rfilename: {"size": s.size, "sha256": s.lfs.sha256 if s.lfs else None} for s in info.siblings
        },
    }


def sums(folder):
    out = {}
    for base, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(base, name)
            with open(path, "rb") as f:
                out[os.path.relpath(path, folder)] = hashlib.sha256(f.read()).hexdigest()
    return out


def facts():
    return {"version": hub.__version__, "endpoint": constants.ENDPOINT, "uid": os.geteuid()}


CALLS = {
    "snapshot_download": hub.snapshot_download,
    "hf_hub_download": hub.hf_hub_download,
    "metadata": metadata,
    "list_files": list_files,
    "sums": sums,
    "facts": facts,
}

try:
    out = {"ok": CALLS[sys.argv[1]](**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))}
except Exception as e:  # the class is what the test wants to know
    out = {"error": type(e).__name__, "classes": [c.__name__ for c in type(e).__mro__], "message": str(e)}
print(json.dumps(out))
