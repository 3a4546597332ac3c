"""``skerry data``: tokenizers and token shards from text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skerry.service.entry import answer, application, exit_on_error

app = application(bare_shows_help=True)

Texts = Annotated[list[str], typer.Argument(help="Text files and folders.", metavar="PATH")]
Out = Annotated[Path, typer.Option(help="New folder for the result.", metavar="FOLDER")]
Suffixes = Annotated[str, typer.Option(help="Endings of a folder's text files.", metavar=".A,.B")]
ENDINGS = ".py,.txt,.md,.rst"


@app.callback()
def data() -> None:
    """Prepare text for a run: train a tokenizer, and write token shards."""


@app.command("train-tokenizer")
def train(
    paths: Texts,
    out: Out,
    vocab: Annotated[
        int, typer.Option(help="Most tokens of the vocabulary.", min=257, max=1 << 20, metavar="N")
    ] = 4096,
    suffixes: Suffixes = ENDINGS,
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    with exit_on_error():
        from skerry.data.prepare import train_tokenizer

        folder, size = train_tokenizer(paths, suffixes.split(","), vocab, out)
        print(f"Wrote {folder}: {size:,} tokens.")


@app.command("prepare")
def prepare_command(
    paths: Texts,
    out: Out,
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json.", metavar="FOLDER")],
    suffixes: Suffixes = ENDINGS,
) -> None:
    """Write the tokens of text as shards, for data.source = "tokens"."""
    with exit_on_error():
        from skerry.data.prepare import prepare
        from skerry.data.tokenizer import Words

        found = prepare(paths, suffixes.split(","), Words.of(tokenizer), out)
        ratio = found.text_bytes / found.tokens
        print(
            f"Wrote {out}: {found.tokens:,} tokens of {found.documents:,} documents,"
            f" {ratio:.2f} bytes per token."
        )


def main() -> None:
    answer(app, "data")


if __name__ == "__main__":
    main()
