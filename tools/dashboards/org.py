"""What each org asks for and gets."""

from tools.dashboards.dashboard import Dashboard, Panel, Variable
from tools.dashboards.queries import RATE, per_second, share

_ORG = '{org=~"$org"}'
ORG = Dashboard(
    "forebay-org",
    "Forebay / Org",
    "What each org asks for and gets. Orgs beyond FOREBAY_METRICS_ORGS are one, `other`; `forebay usage` has each of them.",
    (
        (
            "Now",
            (
                Panel("Requests", {"": f"sum(rate(forebay_org_requests_total{_ORG}{RATE}))"}, "reqps", stat=True),
                Panel(
                    "Tokens",
                    {"": " + ".join(f"sum(rate(forebay_org_{kind}_tokens_total{_ORG}{RATE}))" for kind in ("prompt", "output"))},
                    note="Per second, prompt and output.",
                    stat=True,
                ),
                Panel(
                    "Failed", {"": share("forebay_org_errors_total", "forebay_org_requests_total", where=_ORG)}, "percentunit", stat=True
                ),
                Panel("Over quota", {"": f"sum(rate(forebay_org_quota_refused_total{_ORG}{RATE}))"}, "reqps", stat=True),
            ),
        ),
        (
            "Requests",
            (
                Panel("Requests", per_second("forebay_org_requests_total", "org", _ORG), "reqps"),
                Panel("Failed", {"{{org}}": share("forebay_org_errors_total", "forebay_org_requests_total", "org", _ORG)}, "percentunit"),
                Panel("Over quota", per_second("forebay_org_quota_refused_total", "org", _ORG), "reqps"),
            ),
        ),
        (
            "Tokens",
            (
                Panel("Prompt tokens per second", per_second("forebay_org_prompt_tokens_total", "org", _ORG)),
                Panel("Output tokens per second", per_second("forebay_org_output_tokens_total", "org", _ORG)),
                Panel(
                    "Share of all output tokens",
                    {
                        "{{org}}": f"sum by (org) (rate(forebay_org_output_tokens_total{_ORG}{RATE}))"
                        f" / on () group_left sum(rate(forebay_org_output_tokens_total{RATE}))"
                    },
                    "percentunit",
                ),
            ),
        ),
    ),
    (Variable("org", "forebay_org_requests_total", "org", "Org"),),
)
