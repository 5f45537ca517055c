"""Configs of published models and drafts, by name."""

from stagecoach.published.configs import DRAFTS, MODELS, published_config, published_folder

__all__ = ["DRAFTS", "MODELS", "published_config", "published_folder"]
