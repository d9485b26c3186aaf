"""The safetensors library's own verdict on files. argv: a folder.

Prints one JSON object: file name -> the sorted tensor names, or null where the library refuses the file.
"""
import json
import os
import sys

import safetensors

folder = sys.argv[1]
verdicts = {}
for name in sorted(os.listdir(folder)):
    path = os.path.join(folder, name)
    try:
        with safetensors.safe_open(path, framework="numpy") as f:
            verdicts[name] = sorted(f.keys())
    except Exception:
        verdicts[name] = None
print(json.dumps(verdicts))
