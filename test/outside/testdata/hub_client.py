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


def api(repo_id, revision, folder):
    """The calls of HfApi that read, each with what it says, in short."""
    a = hub.HfApi()
    paths = a.get_paths_info(repo_id, ["config.json", "nope", folder], expand=True)
    return {
        "file_exists": a.file_exists(repo_id, "config.json"),
        "file_missing": a.file_exists(repo_id, "nope.json"),
        "repo_exists": a.repo_exists(repo_id),
        "repo_missing": a.repo_exists("acme/none"),
        "revision_missing": a.revision_exists(repo_id, "nope"),
        "sha": a.model_info(repo_id).sha,
        "sizes": all(s.size is not None for s in a.model_info(repo_id, files_metadata=True).siblings),
        "branch": a.model_info(repo_id, revision=revision).sha,
        "expanded": a.model_info(repo_id, expand=["safetensors", "siblings"]).id,
        "tree": sorted(x.path for x in a.list_repo_tree(repo_id)),
        "whole": sorted(x.path for x in a.list_repo_tree(repo_id, recursive=True, expand=True)),
        "folder": [x.path for x in a.list_repo_tree(repo_id, folder)],
        "no_folder": caught(lambda: list(a.list_repo_tree(repo_id, "additional_chat_templates"))),
        "files": sorted(a.list_repo_files(repo_id)),
        "paths": sorted(x.path for x in paths),
        "refs": sorted(b.name for b in a.list_repo_refs(repo_id).branches),
        "commits": len(a.list_repo_commits(repo_id)),
        "whoami": caught(lambda: a.whoami(token="hf_x")),
        "metadata": len(a.get_safetensors_metadata(repo_id).weight_map),
        "auth": caught(lambda: a.auth_check(repo_id)),
        "one_segment": a.model_info("tinygpt").id,
    }


def caught(call):
    try:
        call()
    except Exception as e:
        return type(e).__name__
    return ""


def file_system(repo_id, filename, revision):
    """HfFileSystem: whole files, ranges, another revision."""
    fs = hub.HfFileSystem()
    whole = fs.cat(f"{repo_id}/{filename}")
    with fs.open(f"{repo_id}@{revision}/{filename}", "rb") as f:
        f.seek(len(whole) // 2)
        middle = f.read(10)
    return {
        "names": sorted(os.path.basename(n) for n in fs.ls(repo_id, detail=False)),
        "size": fs.info(f"{repo_id}/{filename}")["size"],
        "sha256": hashlib.sha256(whole).hexdigest(),
        "head": fs.cat_file(f"{repo_id}/{filename}", start=0, end=8) == whole[:8],
        "middle": middle == whole[len(whole) // 2 :][:10],
        "exists": fs.exists(f"{repo_id}/nope"),
        "branch": sorted(os.path.basename(n) for n in fs.ls(f"{repo_id}@dev%2Ffeature-1", detail=False)),
    }


def facts():
    return {"version": hub.__version__, "endpoint": constants.ENDPOINT, "uid": os.geteuid()}


CALLS = {
    "snapshot_download": hub.snapshot_download,
    "hf_hub_download": hub.hf_hub_download,
    "metadata": metadata,
    "list_files": list_files,
    "sums": sums,
    "facts": facts,
    "api": api,
    "file_system": file_system,
}

try:
    out = {"ok": CALLS[sys.argv[1]](**json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))}
except Exception as e:  # the class is what the test wants to know
    out = {"error": type(e).__name__, "classes": [c.__name__ for c in type(e).__mro__], "message": str(e)}
print(json.dumps(out))
