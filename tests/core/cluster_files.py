"""Clusters as the files that users write."""

import json
from dataclasses import asdict

import yaml

from lightning_hetero.core.cluster import Cluster


def text_of(cluster: Cluster) -> str:
    """Return a cluster as YAML."""
    return yaml.safe_dump(json.loads(json.dumps(asdict(cluster))))
