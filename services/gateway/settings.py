"""The gateway's settings: FOREBAY_* variables, read once in __main__."""

from pathlib import Path

from pydantic import Field

from services.common.settings import HostPort, HostPorts, PemPath, ServiceSettings, listed


class GatewaySettings(ServiceSettings):
    """Where it listens, whom it asks, which models it names and whose tokens it trusts."""

    grpc_address: HostPort = Field("127.0.0.1:0", description="host:port of the gRPC face")
    http_address: HostPort = Field("127.0.0.1:0", description="host:port of the OpenAI face")
    share_ports: bool = Field(
        False, description="whether other gateways may listen on the same two addresses; one that goes then hands over without a gap"
    )
    public_tls_cert_file: PemPath = Field(None, description="PEM certificate for TLS on both faces, with its chain; without: plain")
    public_tls_key_file: PemPath = Field(None, description="its private key")
    schedulers: HostPorts = Field(min_length=1, description="host:port[,host:port...] of the schedulers")
    models: str = Field(description="PATH=NAME[|ALIAS...][,PATH=NAME...]: tokenizers and templates come from the model's own files")
    policy_file: Path | None = Field(None, description="the schedulers' policy file, for models and deadlines, read again when it changes")
    jwks_file: str = Field("", description="file with the public keys of tokens; or jwks_url, or oidc_issuer")
    jwks_url: str = Field("", description="https URL with the public keys of tokens, asked without a proxy; or one of the others")
    oidc_issuer: str = Field("", description="https URL of an OpenID Connect issuer, which says where its keys are; it is the `iss`, too")
    jwt_issuer: str = Field("", description="the `iss` that tokens must carry; empty: any, or the oidc_issuer")
    jwt_audience: str = Field("", description="the `aud` that tokens must carry; empty: any")
    region: str = Field("", max_length=64, description="label of where it is: a worker of another region costs its distance")
    max_tokens_cap: int = Field(32_768, ge=1, description="most tokens that one choice may ask for")
    max_open_calls: int = Field(
        2048, ge=1, description="calls of both faces that may be open at once in this process; more get UNAVAILABLE (503)"
    )
    max_connections: int = Field(4096, ge=1, description="connections that each face of this process holds open at once; more are refused")
    metrics_orgs: int = Field(
        50, ge=0, le=1000, description="orgs with figures of their own in /metrics, those of policy_file first; the rest is `other`"
    )
    batch_lines: int = Field(32, ge=0, le=500, description="lines of batch jobs that run at once, where others leave room; 0: none here")
    drain_seconds: float = Field(30.0, ge=0, description="open streams may go on for so long after SIGTERM")

    @property
    def scheduler_addresses(self) -> list[str]:
        """The schedulers, one each."""
        return listed(self.schedulers)
