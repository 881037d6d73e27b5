"""LangChain's own tests of chat models, against the gateway."""

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.clients.conftest import Served


class TestGateway(ChatModelIntegrationTests):
    """Everything but tools, structured output and images, which need guided decoding or another model."""

    _url = ""

    @pytest.fixture(autouse=True)
    def _of_server(self, served: Served) -> None:
        type(self)._url = served.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": self._url or "http://127.0.0.1:1/v1",
            "api_key": "none",
            "model": "ensemble",
            "max_tokens": 32,
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_json_mode(self) -> bool:
        return False

    @property
    def returns_usage_metadata(self) -> bool:
        return True


class TestResponses(TestGateway):
    """The same by the Responses API."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        shared = {name: value for name, value in super().chat_model_params.items() if name != "stream_usage"}
        return {**shared, "use_responses_api": True}
