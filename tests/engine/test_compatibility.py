"""An engine starts with a supported release of vLLM; another one is refused with one sentence."""

import pytest

from lookahead_vllm.engine import compatibility


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.32.4", None),
        ("0.33.1.dev5+g1a2b", None),
        ("0.34.0", "the installed vLLM is 0.34; install vllm==0.33.*"),
        ("0.3.2", "the installed vLLM is 0.3;"),
        (None, "the installed vLLM is of no release;"),
    ],
)
def test_an_engine_starts_with_a_supported_release(version, says, tmp_path, monkeypatch):
    monkeypatch.setattr(compatibility, "package", lambda: tmp_path)
    if version:
        (tmp_path / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    if says is None:
        compatibility.check()
        return
    with pytest.raises(compatibility.SeamError) as error:
        compatibility.check()
    assert says in str(error.value) and "\n" not in str(error.value)
