"""Laneformer as Transformers models: caches, masks, padding, loss, generate() around model.py's layers.

B batch   S query positions   T key positions   L lanes   D hidden   V vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..cache import KVCache  # noqa: F401  (Transformers 4.57 copies what this file imports alone)
from ..initialization import init_parameter
from ..lanes import LaneRMSNorm
from ..model import LaneformerLayer, LMHead, run_layers
from ..mtp import MTPHead
from ..positions import rope_table
from .configuration_laneformer import LaneformerHFConfig

MASK_FUNCTIONS = {
    "full_attention": create_causal_mask,
    "sliding_attention": create_sliding_window_causal_mask,
}
# One file serves Transformers 4.57 and 5.x. They differ in the arguments of the mask functions and of
# StaticCache.update, and in the cache's name: the signature decides, not the version
MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters
TAKES_CACHE_POSITION = "cache_position" in MASK_ARGUMENTS  # 4.x
CACHE = "cache" if "cache" in MASK_ARGUMENTS else "past_key_values"  # from 5.24 on; before


class PositionedCache:
    """A Transformers 4.x cache with the positions of new keys, which StaticCache cannot know otherwise."""

    def __init__(self, cache: Cache, cache_position: Tensor):
        self.cache, self.where = cache, {"cache_position": cache_position}

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return self.cache.update(key, value, layer_idx, self.where)


class LaneformerPreTrainedModel(PreTrainedModel):
    """Base of both models: initialisation as in training, SDPA only, a vocabulary of fixed size."""

    config_class = LaneformerHFConfig
    config: LaneformerHFConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _input_embed_layer = "tok_embeddings"
    _no_split_modules = ["LaneformerLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012

    def __init__(self, config: LaneformerHFConfig):
        super().__init__(config)
        if self.config._attn_implementation != "sdpa":
            raise ValueError(
                f"attn_implementation = {self.config._attn_implementation!r} is not available for Laneformer; "
                "use 'sdpa' or leave it out"
            )

    def _init_weights(self, module: nn.Module) -> None:
        weight = getattr(module, "weight", None)
        # loaded weights stay
        if weight is None or getattr(weight, "_is_hf_initialized", False):
            return
        # a parameter's name decides its numbers, as in training
        name = next(name for name, candidate in self.named_modules() if candidate is module)
        init_parameter(self.config.to_lanes(), f"{name}.weight".removeprefix("model."), weight)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        # the head's rows belong to lanes, so a longer vocabulary would move them all
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"cannot resize the vocabulary from {self.config.vocab_size} to {new_num_tokens}: the head's rows are "
                "shared out among the lanes; train a model with that vocab_size, or use tokens that exist"
            )
        return self.get_input_embeddings()


class LaneformerModel(LaneformerPreTrainedModel):
    """Embedding, layers and final norm, without the head."""

    def __init__(self, config: LaneformerHFConfig):
        super().__init__(config)
        # built once: torch.compile(fullgraph=True) cannot trace the checks of a config
        self.lanes = lanes = config.to_lanes()
        self.tok_embeddings: nn.Module = nn.Embedding(lanes.vocab_size, lanes.hidden_size)
        self.layers = nn.ModuleList(
            LaneformerLayer(lanes, i) for i in range(lanes.num_hidden_layers)
        )
        self.norm = LaneRMSNorm(lanes)
        # kept with the model for engines that draft with it; neither used nor trained here
        self.mtp = None
        if lanes.num_nextn_predict_layers:
            layer = LaneformerLayer(lanes, lanes.num_hidden_layers)
            self.mtp = MTPHead(lanes, layer).requires_grad_(False)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """Return `last_hidden_state` (B, S, D), the mean over lanes of their normed streams.

        Arguments are those of `streams`.
        """
        h, cache = self.streams(input_ids, **kwargs)
        outputs: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(h).mean(2), **outputs)

    def streams(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Cache | None]:
        """Return the streams (B, S, L, D) after the last layer, and the cache.

        Takes token ids (B, S) or embeddings (B, S, D); `past_key_values` and `cache` both name the cache.
        """
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name, getattr(self.config, name, False)):
                raise ValueError(
                    f"{name} = True is not available for Laneformer; "
                    "register forward hooks on model.layers, whose streams are (B, S, lanes, D)"
                )
        cache = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        embedding = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        checkpointing = self.gradient_checkpointing and self.training
        if (
            cache is None
            and not checkpointing
            and (not self.training if use_cache is None else use_cache)
        ):
            cache = DynamicCache(config=self.config)
        # 4.x hands it over; 5.x warns where it stands in the signature
        cache_position = kwargs.get("cache_position")
        if cache_position is None:
            past = 0 if cache is None else cache.get_seq_length()
            cache_position = torch.arange(embedding.shape[1], device=embedding.device) + past
        if position_ids is None:
            position_ids = positions_of(attention_mask, cache_position)
        masks = self._masks(embedding, attention_mask, cache_position, cache, position_ids)
        positioned: Any = cache
        if cache is not None and TAKES_CACHE_POSITION:
            # StaticCache needs the positions of new keys
            positioned = PositionedCache(cache, cache_position)
        layers: Any = (
            [self._checkpoint_layer(layer) for layer in self.layers]
            if checkpointing
            else self.layers
        )
        # not a buffer from __init__, which would stay empty under the meta-device loading of 5.x
        cos_sin = rope_table(self.lanes, position_ids)
        h, _ = run_layers(layers, self.lanes, embedding, cos_sin, masks, positioned)
        return h, cache

    def _masks(
        self,
        embedding: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        cache_position: Tensor,
        cache: Cache | None,
        position_ids: Tensor,
    ) -> list[Any]:
        """Return one mask a layer, (B or 1, 1, S, T) bool, or None for plain causality."""
        types = self.config.layer_types
        if isinstance(attention_mask, dict):  # generate() with a static cache has made them already
            return [attention_mask[kind] for kind in types]
        arguments: dict[str, Any] = {
            "config": self.config,
            "inputs_embeds" if "inputs_embeds" in MASK_ARGUMENTS else "input_embeds": embedding,
            "attention_mask": attention_mask,
            CACHE: cache,
            "position_ids": position_ids,
        }
        if TAKES_CACHE_POSITION:
            arguments["cache_position"] = cache_position
        by_type = {kind: MASK_FUNCTIONS[kind](**arguments) for kind in set(types)}
        return [by_type[kind] for kind in types]

    def _checkpoint_layer(self, layer: nn.Module) -> Callable[..., Any]:

        def run(
            h: Tensor,
            delayed: tuple,
            cos_sin: tuple[Tensor, Tensor],
            mask: Tensor | None,
            cache: None,
        ) -> tuple:
            # checkpointing tracks tensors in flat arguments only
            def flat(
                h: Tensor, attention: Tensor | None, mlp: Tensor | None
            ) -> tuple[Tensor | None, ...]:
                h, partials = layer(h, (attention, mlp), cos_sin, mask)
                return h, *partials

            h, *partials = self._gradient_checkpointing_func(flat, h, *delayed)
            return h, tuple(partials)

        return run


class LaneformerForCausalLM(LaneformerPreTrainedModel, GenerationMixin):
    """The language model: logits (B, S, V), loss, generate()."""

    def __init__(self, config: LaneformerHFConfig):
        super().__init__(config)
        self.model = LaneformerModel(config)
        self.lm_head = LMHead(config.to_lanes())
        self.post_init()

    def get_output_embeddings(self) -> nn.Module | None:
        # 4.57 would tie it in a shape without lanes
        return None if self.config.tie_word_embeddings else self.lm_head

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, S or fewer, V) in the weights' dtype, and with labels the loss.

        Args:
            labels: (B, S); -100 is left out of the loss.
            logits_to_keep: Number of last positions (0: all), or a tensor of positions.
            kwargs: Further arguments of the loss (num_items_in_batch).
        """
        cache_position = kwargs.pop("cache_position", None)  # the loss does not take it
        h, cache = self.model.streams(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            cache,
            cache_position=cache_position,
            **kwargs,
        )
        positions = (
            slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        )
        logits = self.lm_head(h[:, positions], self.model.norm, self.get_input_embeddings().weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        outputs: dict[str, Any] = {CACHE: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **outputs)


def positions_of(attention_mask: Tensor | dict | None, cache_position: Tensor) -> Tensor:
    """Return positions (B or 1, S); with a padding mask (B, T) a row's first real token is 0."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return cache_position[None]
    # padding before the first token has position 0, too
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return positions[:, cache_position]
