"""Drives the openai library as an application would. argv: base URL, API key.

Reads a JSON list of calls on stdin, {"name", "call", "args", "options"}; "options" goes to the client (max_retries,
timeout), and every request carries the name in the header x-test, so that a server can count tries.
Prints one JSON object: name -> {"ok": value} or {"error": class, "status", "code", "type", "param", "message",
"request_id", "retry_after", "partial"}.
"""
import json
import sys
import time

import openai

base_url, key = sys.argv[1:3]


def models(client, args):
    listed = client.models.list()
    return {"ids": sorted(m.id for m in listed.data), "objects": sorted({m.object for m in listed.data})}


def retrieve_model(client, args):
    m = client.models.retrieve(**args)
    return {"id": m.id, "object": m.object}


def chat(client, args):
    r = client.chat.completions.create(**args)
    return {
        "id": r.id,
        "object": r.object,
        "model": r.model,
        "text": r.choices[0].message.content,
        "finish": r.choices[0].finish_reason,
        "usage": r.usage.model_dump() if r.usage else None,
        "request_id": r._request_id,
    }


def chat_stream(client, args):
    chunks, text, usage, finish, empty_choices, first = 0, "", None, None, 0, None
    models = set()
    begun = time.monotonic()
    try:
        with client.chat.completions.create(stream=True, **args) as stream:
            request_id = stream.response.headers.get("x-request-id")
            content_type = stream.response.headers.get("content-type")
            for c in stream:
                chunks += 1
                models.add(c.model)
                if c.usage:
                    usage = c.usage.model_dump()
                if not c.choices:
                    empty_choices += 1
                    continue
                finish = c.choices[0].finish_reason or finish
                if c.choices[0].delta.content:
                    if first is None:
                        first = time.monotonic() - begun
                    text += c.choices[0].delta.content
    except Exception as e:
        e.partial = text
        raise
    return {
        "chunks": chunks,
        "text": text,
        "usage": usage,
        "finish": finish,
        "empty_choices": empty_choices,
        "models": sorted(models),
        "request_id": request_id,
        "content_type": content_type,
        "ttft_seconds": first,
    }


def completion(client, args):
    r = client.completions.create(**args)
    return {"object": r.object, "model": r.model, "text": r.choices[0].text, "usage": r.usage.model_dump()}


def responses(client, args):
    r = client.responses.create(**args)
    return {
        "id": r.id,
        "object": r.object,
        "model": r.model,
        "status": r.status,
        "text": r.output_text,
        "usage": r.usage.model_dump() if r.usage else None,
        "request_id": r._request_id,
    }


def responses_chain(client, args):
    """Two turns, the second by previous_response_id."""
    first = client.responses.create(**args)
    second = client.responses.create(**{**args, "input": "and then?", "previous_response_id": first.id})
    return {
        "first": first.id,
        "second": second.id,
        "previous": second.previous_response_id,
        "text": second.output_text,
        "usage": second.usage.model_dump() if second.usage else None,
    }


def responses_stream(client, args):
    kinds, text, final = [], "", None
    with client.responses.create(stream=True, **args) as stream:
        for e in stream:
            if e.type not in kinds:
                kinds.append(e.type)
            if e.type == "response.output_text.delta":
                text += e.delta
            if e.type in ("response.completed", "response.incomplete"):
                final = e.response
    return {"kinds": kinds, "text": text, "final": final.output_text if final else None}


def embeddings(client, args):
    r = client.embeddings.create(**args)
    return {
        "object": r.object,
        "model": r.model,
        "count": len(r.data),
        "dimensions": len(r.data[0].embedding),
        "head": r.data[0].embedding[:4],
        "usage": r.usage.model_dump(),
    }


def raw(client, args):
    """Any path, below the typed calls: {"method", "path", "body"}; body is sent as it is."""
    r = client._client.request(
        args["method"],
        base_url + args["path"],
        content=args.get("body", "").encode(),
        headers={"content-type": "application/json", "authorization": "Bearer " + key, "x-test": args["name"]},
    )
    return {"status": r.status_code, "headers": dict(r.headers), "body": r.text[:4000]}


CALLS = {f.__name__: f for f in (models, retrieve_model, chat, chat_stream, completion, responses, responses_chain, responses_stream, embeddings, raw)}


def run(step):
    options = {"timeout": 120, **step.get("options", {})}
    client = openai.OpenAI(base_url=base_url + "/v1", api_key=key, default_headers={"x-test": step["name"]}, **options)
    begun = time.monotonic()
    try:
        out = {"ok": CALLS[step["call"]](client, step.get("args", {}))}
    except Exception as e:
        headers = getattr(getattr(e, "response", None), "headers", {})
        out = {
            "error": type(e).__name__,
            "classes": [c.__name__ for c in type(e).__mro__],
            "status": getattr(e, "status_code", None),
            "code": getattr(e, "code", None),
            "type": getattr(e, "type", None),
            "param": getattr(e, "param", None),
            "message": str(e)[:2000],
            "request_id": getattr(e, "request_id", None),
            "retry_after": headers.get("retry-after"),
            "should_retry": headers.get("x-should-retry"),
            "partial": getattr(e, "partial", None),
        }
    out["seconds"] = round(time.monotonic() - begun, 3)
    return out


out = {"version": openai.__version__}
for step in json.load(sys.stdin):
    out[step["name"]] = run(step)
print(json.dumps(out))
