"""Asks questions about images with the OpenAI package: `python examples/openai_chat.py photo.jpg [--url URL]`.

The server is the reference service (`prefill-reference --model FOLDER`), or a vLLM or SGLang that gets its rows from
the encoder service: the requests are the same. Needs `pip install openai`.
"""

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

QUESTIONS = ("What do these photos show?", "And the first one?")


def data_url(path: Path) -> str:
    """Return the contents of a file as a data URL."""
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def chat(files: list[Path], url: str) -> None:
    """Ask two questions about the same images. The second time, the server already has their rows."""
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(path)}} for path in files]
    client = OpenAI(base_url=url, api_key="none")
    model = next(iter(client.models.list())).id
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": [*content, {"type": "text", "text": question}]})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
        text, usage = answer.choices[0].message.content, answer.usage
        print(f"{question}\n  {text!r}, {usage.prompt_tokens if usage else 0} prompt tokens")
        messages.append({"role": "assistant", "content": text})
        content = []


def main() -> None:
    """Run the example from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    arguments = parser.parse_args()
    try:
        chat(arguments.files, arguments.url)
    except OpenAIError as error:
        raise SystemExit(f"{arguments.url}: {error}") from None
    except OSError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
