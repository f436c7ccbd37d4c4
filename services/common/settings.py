"""Settings come from FOREBAY_* environment variables, are read once in __main__, and are then plain frozen values."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """What every service has. A field `x_y` is the variable FOREBAY_X_Y."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_", frozen=True, extra="ignore")

    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error")
    internal_address: str = Field("127.0.0.1:0", description="host:port of /metrics, /health and /ready; keep it off public networks")
