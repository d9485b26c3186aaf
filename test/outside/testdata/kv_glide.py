"""Uses a KV store through valkey GLIDE as LMCache does. argv: name of a call, its keyword arguments as JSON.

Prints one JSON object: {"ok": value} or {"error": class, "message": text}.
"""
import concurrent.futures
import hashlib
import json
import random
import sys

import glide_sync as glide

glide.Logger.set_logger_config(glide.LogLevel.OFF)  # it would print to standard output


def value(seed, size):
    return random.Random(f"{seed} {size}").randbytes(size)


def connect(host, port, password=None, username=None, database=0):
    credentials = None
    if password is not None:
        credentials = glide.ServerCredentials(password=password, username=username)
    return glide.GlideClient.create(
        glide.GlideClientConfiguration(
            [glide.NodeAddress(host, port)], credentials=credentials, database_id=database, request_timeout=60_000
        )
    )


def short(answer):
    if isinstance(answer, bytes):
        return f"{len(answer)} bytes {hashlib.sha256(answer).hexdigest()[:16]}"
    return answer


def answers(**server):
    c = connect(**server)
    expiry = glide.ExpirySet(glide.ExpiryType.SEC, 3600)
    chunk = "acme/tiny@1@0@-359a7f@half"
    out = [
        c.get("nowhere"),
        c.exists(["nowhere"]),
        c.set(chunk, value(1, 70_000)),
        c.exists([chunk]),
        short(c.get(chunk)),
        c.set(chunk, value(2, 70_000), expiry=expiry),
        short(c.get(chunk)),
        c.set(chunk, "not this", conditional_set=glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST),
        short(c.get(chunk)),
        c.set(chunk, "this", conditional_set=glide.ConditionalChange.ONLY_IF_EXISTS),
        short(c.get(chunk)),
        c.delete([chunk, "nowhere"]),
        c.get(chunk),
        c.exists([chunk]),
        short(c.ping()),
        short(c.echo("text")),
    ]
    c.close()
    return out


def role(**server):
    c = connect(**server)
    text = c.info([glide.InfoSection.REPLICATION]).decode()
    c.close()
    return [line.strip() for line in text.splitlines() if line.startswith("role:")]


def databases(**server):
    zero, three = connect(**server), connect(**server, database=3)
    zero.set("k", "zero")
    three.set("k", "other")
    out = [short(zero.get("k")), short(three.get("k")), three.delete(["k"]), short(zero.get("k")), zero.delete(["k"])]
    zero.close()
    three.close()
    return out


def values(sizes, **server):
    c = connect(**server)
    wrong = []
    for size in sizes:
        key = f"acme/big{size}@1@0@7f@half"
        for seed in range(2):
            made = value(seed, size)
            c.set(key, made)
            if c.get(key) != made:
                wrong.append([size, seed])
        if c.delete([key]) != 1 or c.get(key) is not None:
            wrong.append([size, "after"])
    c.close()
    return {"sizes": len(sizes), "wrong": wrong}


def together(workers, rounds, size, **server):
    """As many clients as LMCache has workers, each asks, stores, asks and fetches chunks of its own."""

    def work(n):
        c, wrong = connect(**server), 0
        for i in range(rounds):
            key, made = f"acme/tiny@1@0@{n:x}{i:08x}@half", value(f"{n} {i}", size)
            wrong += c.exists([key]) != 0
            c.set(key, made)
            wrong += c.exists([key]) != 1 or c.get(key) != made
            wrong += c.delete([key]) != 1
        c.close()
        return wrong

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return {"calls": workers * rounds, "wrong": sum(pool.map(work, range(workers)))}


def login(passwords, username=None, **server):
    out = []
    for password in passwords:
        try:
            c = connect(**server, password=password, username=username if password else None)
            out.append(c.get("nowhere"))
            c.close()
        except glide.GlideError as e:
            out.append(type(e).__name__)
    return out


CALLS = {f.__name__: f for f in (answers, role, databases, values, together, login)}

try:
    out = {"ok": CALLS[sys.argv[1]](**json.loads(sys.argv[2]))}
except Exception as e:  # the class is what the test wants to know
    out = {"error": type(e).__name__, "message": str(e)}
print(json.dumps(out))
