"""Tokens to text while they come: whole characters, in constant time each, up to a stop text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from attnplug_engine.text.tokenizer import FileTokenizer
from attnplug_engine.text.transcript import Transcript

TEXT = "héllo €uro, 日本語 🙂🙃 done.  Two  spaces\n\nand a line"


def byte_level() -> Tokenizer:
    """A tokenizer like those of GPT-2, Llama 3 and Qwen: bytes as characters; a character of several bytes is several
    tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: spaces are marks, the first is dropped, and unknown characters are byte tokens."""
    marked = {character.replace(" ", "▁") for character in TEXT if character.isascii()}
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(marked), "▁▁", "ll"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("l", "l")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


@pytest.fixture(params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> FileTokenizer:
    path = tmp_path / "tokenizer.json"
    request.param().save(str(path))
    return FileTokenizer(path, 1 << 20)


class Counting:
    """A tokenizer that takes down how many tokens it is given at a time."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self.counts: list[int] = []

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.counts.append(len(token_ids))
        return self._tokenizer.decode(token_ids)


class Pieces:
    """Token number n reads as the n-th piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in token_ids)


@pytest.mark.parametrize("repeats", [1, 40])
def test_pieces_are_whole_characters_and_together_the_text(tokenizer, repeats):
    end = tokenizer.encode("<end>")
    ids = (tokenizer.encode(TEXT) + end) * repeats  # a special token reads as nothing
    counting = Counting(tokenizer)
    transcript = Transcript(counting)
    pieces = [transcript.push(token) for token in ids]
    assert "".join(pieces) + transcript.finish() == transcript.text == tokenizer.decode(ids)
    assert "\ufffd" not in transcript.text
    assert pieces.count("") > repeats, "no character is divided over tokens here"
    assert max(counting.counts) < 40, "decoded anew with all that came before"


def test_a_character_that_is_never_complete_is_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("a日")
    transcript = Transcript(tokenizer)
    assert "".join(transcript.push(token) for token in ids[:-1]) == "a"
    assert set(transcript.finish()) == {"\ufffd"} and transcript.text == tokenizer.decode(ids[:-1])
    assert transcript.finish() == ""


def test_what_is_held_back_comes_before_a_character_that_is_never_complete(tokenizer):
    ids = tokenizer.encode("a日")[:-1]
    transcript = Transcript(tokenizer, ["ab"])
    assert "".join(transcript.push(token) for token in ids) == ""
    assert transcript.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize(("text", "characters"), [("日", 100), ("<end>", 0)], ids=["garbage", "nothing"])
def test_what_gives_no_character_is_not_waited_on_for_ever(tokenizer, text, characters):
    token = tokenizer.encode(text)[-1]
    counting = Counting(tokenizer)
    transcript = Transcript(counting)
    for _ in range(200):
        transcript.push(token)
    assert len(transcript.text) >= characters and max(counting.counts) < 40


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """Reference, character by character: the text in front of the stop text, and the end of the latter."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))], end
    return text, None


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("xabcabd!", ["abcabd"]),
        ("xabcabcab", ["abcabd", "cc"]),
        ("aaab-aab", ["aab"]),
        ("zabcdz", ["abcd", "bc"]),
        ("zabcz", ["bc", "abc", "c"]),
        ("ab\n\n", ["\n\n"]),
        ("ab", ["ab"]),
    ],
)
def test_a_stop_text_is_found_however_tokens_divide_it(text, stops):
    expected, end = first_stop(text, stops)
    places = range(1, len(text))
    for count in range(len(text)):
        for cuts in itertools.combinations(places, count):
            bounds = [0, *cuts, len(text)]
            pieces = [text[start:stop] for start, stop in itertools.pairwise(bounds)]
            transcript = Transcript(Pieces(pieces), stops)
            shown = ""
            for token in range(len(pieces)):
                shown += transcript.push(token)
                assert expected.startswith(shown), "what may be part of a stop text is held back"
                assert transcript.stopped == (end is not None and bounds[token + 1] >= end)
            assert shown + transcript.finish() == transcript.text == expected


def test_text_that_cannot_be_part_of_a_stop_text_comes_at_once():
    transcript = Transcript(Pieces(["on", "e S", "T", "ILL"]), ["STOP"])
    assert [transcript.push(token) for token in range(4)] == ["on", "e ", "", "STILL"]
