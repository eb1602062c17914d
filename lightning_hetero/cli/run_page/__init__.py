"""Pages about runs and plans: their contents, laid out here and drawn by the templates."""

from typing import Any

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["render_page"]


def render_page(template: str, **values: Any) -> str:
    """Return a page as HTML, all values escaped.

    Raises:
        ConfigurationError: Jinja2 isn't installed.
    """
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise ConfigurationError(
            "The page needs Jinja2: pip install 'lightning-hetero[report]'."
        ) from error
    loader = PackageLoader(__name__, ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True)
    return environment.get_template(template).render(**values)
