"""``skerry data``: tokenizers and token shards from text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.service.entry import AsJson, answer, application, exit_on_error

if TYPE_CHECKING:
    from skerry.data.documents import Article

PROGRESS_S = 2.0

app = application(bare_shows_help=True)

Sources = Annotated[
    list[str],
    typer.Argument(help="Files, folders, patterns, or module:function.", metavar="SOURCE"),
]
Out = Annotated[Path, typer.Option(help="New folder for the result.", metavar="FOLDER")]
Field = Annotated[
    str, typer.Option(help="Column or key of the text; messages: conversations.", metavar="NAME")
]


@app.callback()
def data() -> None:
    """Prepare text for a run: train a tokenizer, and write token shards."""


@app.command("train-tokenizer")
def train(
    sources: Sources,
    out: Out,
    vocab: Annotated[
        int, typer.Option(help="Most tokens of the vocabulary.", min=257, max=1 << 20, metavar="N")
    ] = 4096,
    field: Field = "text",
    *,
    json: AsJson = False,
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    with exit_on_error():
        from skerry.data.tokenizer import train_tokenizer

        words = train_tokenizer(_texts(_read(sources, field)[1]), vocab, out)
        found = {"folder": str(out), "tokens": words.size, "digest": words.digest}
        print(dumps(found) if json else f"Wrote {out}: {words.size:,} tokens.")


@app.command("prepare")
def prepare_command(
    sources: Sources,
    out: Out,
    tokenizer: Annotated[Path, typer.Option(help="Folder with tokenizer.json.", metavar="FOLDER")],
    field: Field = "text",
    *,
    json: AsJson = False,
) -> None:
    """Write the tokens of text, JSON lines or Parquet, for data.source = "prepared".

    If it was killed, the same command goes on from there.
    """
    with exit_on_error():
        from skerry.data.prepare import key_of, prepare
        from skerry.data.tokenizer import Words

        words = Words.of(tokenizer)
        known, articles = _read(sources, field)
        found = prepare(articles, words, out, sources, _progress(), key=key_of(known, words))
        said = f"Wrote {out}: {found.tokens:,} tokens of {_number(found.documents, 'document')}."
        print(found.model_dump_json() if json else said)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A prepared folder.", metavar="FOLDER")],
    *,
    json: AsJson = False,
) -> None:
    """Check a prepared folder, all of its bytes, and say what it holds."""
    with exit_on_error():
        from skerry.data.shards import verify

        found = verify(folder, _progress())
        said = (
            f"{folder}: {found.tokens:,} tokens of {_number(found.documents, 'document')} in"
            f" {_number(len(found.shards), 'shard')}, as they were prepared, that write"
            f" {found.text_bytes:,} bytes; a vocabulary of {found.vocab:,} tokens, tokenizer"
            f" {found.tokenizer or 'unknown'}."
        )
        print(found.model_dump_json() if json else said)


def _number(many: int, noun: str) -> str:
    return f"{many:,} {noun}{'' if many == 1 else 's'}"


def _read(sources: list[str], field: str) -> tuple[str, Iterator[Article]]:
    """Return the fingerprint of sources, and their documents.

    A user who names a function here also allows its module.
    """
    from skerry import code
    from skerry.data import documents, items
    from skerry.settings.models import DataConfig

    first = sources[0]
    module = "" if len(sources) > 1 else code.module_of(first)
    names = first.replace(":", ".", 1).split(".")
    if module and all(map(str.isidentifier, names)) and not Path(first).exists():
        code.allow([module])
        config = DataConfig(factory=first, field=field)
        dataset = items.open_dataset(config)
        return items.fingerprint(dataset, config), items.read_items(dataset, field)
    files = documents.find_sources(sources)
    return documents.fingerprint(files, field), documents.read_all(files, field)


def _texts(articles: Iterable[Article]) -> Iterator[str]:
    """Yield the text of documents and of messages in conversations; print the progress."""
    say, characters = _progress("characters"), 0
    for number, one in enumerate(articles, 1):
        text = one.text or "\n".join(message["content"] for message in one.messages)
        yield text
        characters += len(text)
        say(number, characters)


def _progress(unit: str = "tokens") -> Callable[[int, int], None]:
    """Return a function that prints the progress now and then."""
    began_s = said_s = time.monotonic()

    begun: int | None = None

    def say(documents: int, done: int) -> None:
        nonlocal said_s, begun
        begun = done if begun is None else begun
        now_s = time.monotonic()
        if now_s - said_s >= PROGRESS_S:
            said_s, rate = now_s, (done - begun) / (now_s - began_s)
            print(f"{documents:,} documents, {done:,} {unit} ({rate:,.0f}/s)", file=sys.stderr)

    return say


def main() -> None:
    answer(app, "data")


if __name__ == "__main__":
    main()
