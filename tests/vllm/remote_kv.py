"""A KV connector that loads the prompts of some requests from elsewhere, block by block in no time of the worker's."""

# ruff: noqa: ARG002 - a connector carries out vLLM's protocol, whatever it makes of its arguments

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class RemoteKv(KVConnectorBase_V1):
    """Requests whose names begin with `remote` have all but the last token of their prompt elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loading: set[str] = set()
        """Those that hold blocks and wait for what belongs into them."""
        self._known: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not request.request_id.startswith("remote") or request.request_id in self._known:
            return 0, False
        missing = max(request.num_prompt_tokens - 1 - num_computed_tokens, 0)
        return missing, missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._known.add(request.request_id)
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
