"""The settings table of README.md, made from the settings classes: `python tools/config_table.py README.md` writes it in place."""

import sys
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from services.common.settings import ServiceSettings
from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings

_START, _END = "<!-- settings -->\n", "<!-- end of settings -->\n"
_CLASSES: dict[str, type[ServiceSettings]] = {
    "every service": ServiceSettings,
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


def table() -> str:
    """One Markdown row per setting."""
    rows = ["| service | variable | default | meaning |", "| --- | --- | --- | --- |"]
    for service, settings in _CLASSES.items():
        for name, field in settings.model_fields.items():
            if settings is not ServiceSettings and name in ServiceSettings.model_fields:
                continue
            rows.append(f"| {service} | `FOREBAY_{name.upper()}` | {_default(field)} | {_escape(field.description or '')} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str) -> str:
    """The README with its table made anew."""
    before, rest = readme.split(_START)
    after = rest.split(_END)[1]
    return before + _START + table() + _END + after


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be set"
    # A default that is made at the start (a host's name, say) is told in the meaning.
    return "" if field.default in ("", None, PydanticUndefined) else f"`{field.default}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
