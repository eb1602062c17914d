"""Clusters as the files that users write."""

import yaml

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.reading import plain


def text_of(cluster: Cluster) -> str:
    """Return a cluster as YAML."""
    return yaml.safe_dump(plain(cluster))
