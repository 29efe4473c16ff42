"""The OpenAI-compatible HTTP API in front of a `Gateway`."""

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ChatTokenizer, UnsupportedTokenizer

__all__ = ["ApiSettings", "ChatTokenizer", "UnsupportedTokenizer", "create_app"]
