"""Loads configurations and a tokenizer by name, as an engine does before the weights. argv: repository.

Prints one JSON object with what the two say of themselves.
"""
import json
import sys

import transformers

name = sys.argv[1]
config = transformers.AutoConfig.from_pretrained(name)
tokenizer = transformers.AutoTokenizer.from_pretrained(name)
generation = transformers.GenerationConfig.from_pretrained(name)
ids = tokenizer.encode("the cache holds weights on the node", add_special_tokens=False)
print(
    json.dumps(
        {
            "version": transformers.__version__,
            "model_type": config.model_type,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "eos": generation.eos_token_id,
            "ids": ids,
            "text": tokenizer.decode(ids),
            "chat": tokenizer.apply_chat_template(
                [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
            ),
        }
    )
)
