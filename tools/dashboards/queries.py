"""PromQL that panels have in common: legend -> expression."""

from collections.abc import Sequence

RATE = "[$__rate_interval]"


def quantiles(series: str, by: str = "", where: str = "", points: Sequence[float] = (0.5, 0.99)) -> dict[str, str]:
    """Quantiles of a histogram, by a label beside."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{point * 100:g}{legend}": f"histogram_quantile({point}, sum by ({labels}) (rate({series}_bucket{where}{RATE})))"
        for point in points
    }


def per_second(series: str, by: str, where: str = "") -> dict[str, str]:
    """A counter's rate, by a label."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({series}{where}{RATE}))"}


def share(of: str, whole: str, by: str = "", where: str = "") -> str:
    """One counter's rate over another's."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({of}{where}{RATE})) / sum{grouping} (rate({whole}{where}{RATE}))"
