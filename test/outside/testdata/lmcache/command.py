"""The `lmcache` command, with what torch lacks."""
import torch_shim  # noqa: F401, before lmcache

from lmcache.cli.main import main

if __name__ == "__main__":
    main()
