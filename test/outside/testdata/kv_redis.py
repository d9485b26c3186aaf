"""Uses a KV store through redis-py as its users do. argv: name of a call, its keyword arguments as JSON.

Prints one JSON object: {"ok": value} or {"error": class, "message": text}. Where a store is run beside another to
compare them, the value holds nothing that is a server's own.
"""
import asyncio
import hashlib
import json
import random
import sys
import threading
import time

import redis
import redis.asyncio

KIB, MIB = 1 << 10, 1 << 20


def value(seed, size):
    """A value that says by its first bytes which it is."""
    return random.Random(f"{seed} {size}").randbytes(size)


def short(answer):
    """An answer as JSON can hold it."""
    if isinstance(answer, (bytes, memoryview)):
        answer = bytes(answer)
        return f"{len(answer)} bytes {hashlib.sha256(answer).hexdigest()[:16]}" if len(answer) > 64 else answer.decode("latin1")
    if isinstance(answer, (list, tuple)):
        return [short(a) for a in answer]
    return answer


def caught(call, *args, **options):
    try:
        return short(call(*args, **options))
    except redis.exceptions.RedisError as e:
        return type(e).__name__


STEPS = [
    ("set", "a", value(1, 4 * KIB)),
    ("get", "a"),
    ("get", "nowhere"),
    ("exists", "a"),
    ("exists", "a", "nowhere", "a"),
    ("set", "a", value(2, 4 * KIB)),
    ("get", "a"),
    ("set", "a", value(3, 9 * KIB)),
    ("get", "a"),
    ("strlen", "a"),
    ("strlen", "nowhere"),
    ("type", "a"),
    ("type", "nowhere"),
    ("ttl", "a"),
    ("ttl", "nowhere"),
    ("mget", "a", "nowhere", "b"),
    ("set", "b", b"one byte more", {"ex": 3600}),
    ("get", "b"),
    ("set", "b", b"not this", {"nx": True}),
    ("get", "b"),
    ("set", "c", b"but this", {"nx": True, "ex": 3600}),
    ("get", "c"),
    ("set", "d", b"not this", {"xx": True}),
    ("get", "d"),
    ("set", "c", b"and this", {"xx": True, "px": 3_600_000}),
    ("set", "c", b"that", {"get": True}),
    ("get", "c"),
    ("set", "d", b"the first", {"get": True}),
    ("set", "e", b"\x00\r\n$-1\r\n*1\r\n\xff" * 9),
    ("get", "e"),
    ("set", "f", b"x"),
    ("get", "f"),
    ("set", "acme/tiny@1@0@-359a7f@half@0@user%alice", value(4, 70 * KIB)),
    ("get", "acme/tiny@1@0@-359a7f@half@0@user%alice"),
    ("set", b"\x00\xff\r\n key", b"of any bytes"),
    ("get", b"\x00\xff\r\n key"),
    ("mget", "a", "b", "c", "nowhere", "e"),
    ("delete", "a"),
    ("delete", "a"),
    ("get", "a"),
    ("exists", "a"),
    ("delete", "b", "c", "nowhere", "b"),
    ("unlink", "d", "e", "f"),
    ("exists", "b", "c", "d", "e", "f"),
    ("ping",),
    ("echo", "text"),
    ("client_setname", "name"),
    ("client_getname",),
    ("execute_command", "NOSUCHCOMMAND", "a"),
    ("execute_command", "GET"),
    ("execute_command", "SET", "a", "b", "EX", "0"),
    ("execute_command", "SET", "a", "b", "NX", "XX"),
    ("execute_command", "CLIENT", "NOSUCH"),
    ("get", "a"),
]


def split(step):
    name, *args = step
    options = args.pop() if args and isinstance(args[-1], dict) else {}
    return name, args, options


def connect(module, url, protocol, password=None, **options):
    return module.Redis.from_url(url, protocol=protocol, password=password, socket_timeout=60, **options)


def answers(url, protocol, password=None):
    """Each step's answer, one by one and then in pipelines."""
    client = connect(redis, url, protocol, password)
    out = []
    for step in STEPS:
        name, args, options = split(step)
        out.append([name, caught(getattr(client, name), *args, **options)])
    # A pipeline is sent whole before an answer is read: where it has both values and questions for them, it is no
    # longer than a socket holds.
    pipe = client.pipeline(transaction=False)
    for i in range(50):
        pipe.set(f"p{i}", value(i, 1 + 97 * i)).get(f"p{i}").exists(f"p{i}").get(f"q{i}").delete(f"p{i}", f"q{i}").get(f"p{i}")
    out.append(["pipeline of all", short(pipe.execute())])
    pipes = [client.pipeline(transaction=False) for _ in range(3)]
    for i in range(200):
        pipes[0].set(f"p{i}", value(i, 300 * i + 1))
        pipes[1].get(f"p{i}").get(f"q{i}")
        pipes[2].delete(f"p{i}")
    out += [["pipeline of one", short(pipe.execute())] for pipe in pipes]
    pipe = client.pipeline(transaction=False)
    pipe.set("p", "1").execute_command("NOSUCHCOMMAND").get("p").execute_command("GET").get("p").delete("p")
    results = pipe.execute(raise_on_error=False)
    out.append(["pipeline with errors", [type(r).__name__ if isinstance(r, Exception) else short(r) for r in results]])
    return out + [["databases", databases(url, protocol, password)], ["role", client.info("replication")["role"]]]


def databases(url, protocol, password):
    """What one database has, another has not."""
    zero, three = (connect(redis, url, protocol, password, db=n) for n in (0, 3))
    zero.set("k", "zero")
    three.set("k", "three")
    found = [short(zero.get("k")), short(three.get("k")), three.delete("k"), short(zero.get("k")), short(three.get("k"))]
    return found + [zero.delete("k"), caught(connect(redis, url, protocol, password, db=1 << 40).get, "k")]


async def answers_async(url, protocol, password=None):
    client = connect(redis.asyncio, url, protocol, password)
    out = []
    for step in STEPS:
        name, args, options = split(step)
        try:
            out.append([name, short(await getattr(client, name)(*args, **options))])
        except redis.exceptions.RedisError as e:
            out.append([name, type(e).__name__])
    together = range(60)
    out.append(["gather", await asyncio.gather(*(client.set(f"g{i}", value(i, 5000 + i)) for i in together))])
    out.append(["gather", short(await asyncio.gather(*(client.get(f"g{i}") for i in (*together, "none"))))])
    out.append(["gather", await asyncio.gather(*(client.delete(f"g{i}") for i in (*together, "none")))])
    await client.aclose()
    return out


def values(url, protocol, sizes, password=None):
    """Stores a value of each size, twice with other bytes, and compares every byte that comes back."""
    client = connect(redis, url, protocol, password)
    wrong = []
    for size in sizes:
        key = f"acme/big{size}@1@0@7f@half"
        for seed in range(2):
            made = value(seed, size)
            client.set(key, made)
            for _ in range(2):
                got = client.get(key)
                if got != made:
                    wrong.append([size, seed, "nothing" if got is None else short(got)])
        if client.strlen(key) != size or client.delete(key) != 1 or client.get(key) is not None:
            wrong.append([size, "after"])
    return {"sizes": len(sizes), "wrong": wrong}


def storm(url, protocol, workers, rounds, password=None):
    """Many connections overwrite, read and delete the same few keys: what is read is one of the values, whole."""
    sizes = [KIB, 40 * KIB, 300 * KIB, MIB + 1]
    shared = {f"shared{k}": [value(f"{k} {v}", sizes[(k + v) % len(sizes)]) for v in range(4)] for k in range(6)}
    whole = {k: {hashlib.sha256(v).digest() for v in vs} for k, vs in shared.items()}
    wrong, counts, lock, failed = [], {"hits": 0, "misses": 0, "own": 0}, threading.Lock(), []

    def work(n):
        client, choose = connect(redis, url, protocol, password), random.Random(n)
        own = {}
        for i in range(rounds):
            key = choose.choice(list(shared))
            action = choose.random()
            if action < 0.3:
                client.set(key, choose.choice(shared[key]))
            elif action < 0.35:
                client.delete(key)
            elif action < 0.75:
                got = client.get(key)
                with lock:
                    counts["misses" if got is None else "hits"] += 1
                    if got is not None and hashlib.sha256(got).digest() not in whole[key]:
                        wrong.append([key, short(got)])
            else:
                mine = f"own{n}-{i % 5}"
                own[mine] = value(f"{n} {i}", choose.choice(sizes))
                client.set(mine, own[mine])
                for k, v in own.items():
                    if client.get(k) != v:
                        with lock:
                            wrong.append([k, "not what was stored"])
                with lock:
                    counts["own"] += len(own)
        client.delete(*own, "none")

    def guarded(n):
        try:
            work(n)
        except Exception as e:  # a thread's end must not pass unseen
            failed.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {**counts, "wrong": wrong[:10], "failed": failed[:10]}


def login(url, protocol, passwords, username=None):
    """What a client is told that shows each password, null for none, and then asks for a key."""
    out = []
    for password in passwords:
        client = connect(redis, url, protocol, password, username=username if password else None)
        out.append(caught(client.get, "nowhere"))
    return out


def store(url, protocol, count, size, seed, password=None):
    client = connect(redis, url, protocol, password)
    return [bool(client.set(f"k{i}", value(f"{seed} {i}", size))) for i in range(count)]


def load(url, protocol, count, size, seed, password=None):
    """Which of the values that store stored are there, and whether any has other bytes."""
    client = connect(redis, url, protocol, password)
    got = [client.get(f"k{i}") for i in range(count)]
    made = [value(f"{seed} {i}", size) for i in range(count)]
    return {
        "exists": client.exists(*(f"k{i}" for i in range(count))),
        "equal": sum(g == m for g, m in zip(got, made)),
        "wrong": sum(g is not None and g != m for g, m in zip(got, made)),
    }


def wait(url, protocol, seconds, password=None):
    """Waits until the server answers."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(redis, url, protocol, password).ping()
        except redis.exceptions.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


CALLS = {f.__name__: f for f in (answers, answers_async, values, storm, login, store, load, wait)}

try:
    result = CALLS[sys.argv[1]](**json.loads(sys.argv[2]))
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    out = {"ok": result}
except Exception as e:  # the class is what the test wants to know
    out = {"error": type(e).__name__, "message": str(e)}
print(json.dumps(out))
