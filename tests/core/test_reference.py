"""The generated pages of docs/ say what the source says."""

from tools.reference.__main__ import pages, stale


def test_the_generated_pages_are_up_to_date() -> None:
    assert stale() == [], "run `python -m tools.reference`"


def test_every_message_and_every_key_is_there() -> None:
    text = {path.name: page for path, page in pages().items()}
    for words in ("#### Generate", "`confirmed_ids`", "#### packed.ROW", "`producer_step`"):
        assert words in text["wire.md"]
    for words in ("## [router]", "`max_model_len`", "silent for longer is lost"):
        assert words in text["configuration.md"]
    assert "POST /v1/chat/completions" in text["api.md"]
