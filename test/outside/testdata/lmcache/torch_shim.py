"""Gives Debian's torch 1.13 the names of newer ones that LMCache mentions while it is imported.

Whoever imports lmcache imports this first. The types are names only: no tensor can have one.
"""
import ctypes
import gc

import torch

NAMED_ONLY = {
    "float4_e2m1fn_x2": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}


class NamedType:
    is_complex = False
    is_floating_point = True

    def __init__(self, name, size):
        self.name, self.itemsize = name, size

    def __repr__(self):
        return f"torch.{self.name}"


for name, size in NAMED_ONLY.items():
    if not hasattr(torch, name):
        setattr(torch, name, NamedType(name, size))

if not hasattr(torch.dtype, "itemsize"):
    # A type written in C takes no attribute by assignment; its dictionary does.
    (attributes,) = [d for d in gc.get_referents(torch.dtype.__dict__) if isinstance(d, dict)]
    attributes["itemsize"] = property(lambda dtype: torch.empty((), dtype=dtype).element_size())
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.dtype))

if not hasattr(torch, "compile"):

    def compiled(function=None, **options):
        return function if function is not None else lambda f: f

    torch.compile = compiled
