"""The README's settings are the settings that there are."""

from pathlib import Path

from tools import config_table

README = Path(__file__).parents[3] / "README.md"


def test_the_readme_lists_every_setting_as_the_classes_have_it() -> None:
    text = README.read_text(encoding="utf-8")
    assert config_table.with_table(text) == text, "run `make config-table`"


def test_a_row_names_variable_default_and_meaning() -> None:
    assert "| worker | `FOREBAY_BLOCK_SIZE` | `16` | tokens per cache block |" in config_table.table()
    assert "| worker | `FOREBAY_MODEL` | must be set | PATH[=NAME]" in config_table.table()
