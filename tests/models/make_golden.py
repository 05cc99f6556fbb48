"""Makes the golden files from independent readers of the same GGUF file; it is no part of the tests.

Logits come from PyTorch through ``transformers``, in float32; token ids from
llama.cpp, since ``transformers`` drops the digit rule of the pre-tokenizer when it reads a GGUF file. In an
environment of its own::

  pip install torch "transformers>=5" accelerate gguf llama-cpp-python==0.3.2
  python tests/models/make_golden.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

DATA = Path(__file__).parent / "data"
TOP = 16

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had not caught anything for "
    "eighty-four days. Every morning he rowed out before the sun was up, and every evening he came back with "
    "an empty boat. The other fishermen laughed at him, but the boy who had",
]

TEXTS = [
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n\n",
        "\t",
        " \t \n ",
        "a",
        "Hello, world!",
        " Hello",
        "hello world ",
        "I'll don't we've",
    ),
    *(
        "0",
        "42",
        "3.14159",
        "  7",
        "a1b2c3",
        "2024-02-29T12:00:00Z",
        "x = 10 ** 100",
        "½ ² Ⅷ ٣٤ 五",
        "1\n2\n 3\n  4",
    ),
    *(
        "Größe",
        "naïve café",
        "Straße ÄÖÜß",
        "日本語のテキスト",
        "中文分词",
        "한국어",
        "Привет, мир",
        "שלום",
        "مرحبا بالعالم",
    ),
    *(
        "हिन्दी",
        "😀",
        "👩‍👩‍👧‍👦 family",
        "🇫🇷🇩🇪",
        "e\u0301 é",
        "\u00a0nbsp\u2003em",
        "\u200bzero\u200dwidth",
        "\ufeffbom",
    ),
    *(
        "for i in range(10):\n\tprint(i)\n",
        "<div class='x'>&amp;</div>",
        "https://example.org/a?b=c&d=1#e",
        "\\n\\t\\\\",
    ),
    *("   leading and trailing   ", "CamelCaseAndSNAKE_CASE", "!!!???...", "a" * 60, "=" * 33, "ab " * 20),
    *(
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|endoftext|>",
        "<|im_start|><|im_end|>",
        "x<|im_end|>y",
        "<|im_start |>",
    ),
    "The quick brown fox jumps over the lazy dog. " * 2,
    "Mixed: 12 apples, 3½ pears, 日本 7月, and 😀😀!\r\nNext line\r\n",
]


def logits(path: Path) -> list[dict[str, object]]:
    """Scores the prompts with PyTorch: the likeliest tokens after the last position."""
    import torch
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    vocabulary = Llama(str(path), vocab_only=True, verbose=False)
    golden = []
    for prompt in PROMPTS:
        ids = vocabulary.tokenize(prompt.encode(), add_bos=False, special=True)
        with torch.no_grad():
            values, top = model(torch.tensor([ids])).logits[0, -1].float().topk(TOP)
        golden.append(
            {
                "prompt": prompt,
                "ids": ids,
                "top": top.tolist(),
                "logits": [round(x, 5) for x in values.tolist()],
            }
        )
    return golden


def token_ids(path: Path) -> list[dict[str, object]]:
    """Encodes the texts with llama.cpp, special tokens included, BOS not added."""
    from llama_cpp import Llama

    vocabulary = Llama(str(path), vocab_only=True, verbose=False)
    return [
        {"text": text, "ids": vocabulary.tokenize(text.encode(), add_bos=False, special=True)}
        for text in TEXTS
    ]


def main() -> None:
    path = Path(sys.argv[1])
    DATA.mkdir(exist_ok=True)
    for name, golden in (("smollm2_logits.json", logits(path)), ("smollm2_tokens.json", token_ids(path))):
        lines = ",\n ".join(json.dumps(item) for item in golden)
        (DATA / name).write_text(f"[{lines}]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
