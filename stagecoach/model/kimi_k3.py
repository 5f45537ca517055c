"""The model of one stage: which sublayers its layers have, and their order.

Kimi-K3 and Kimi-Linear run the same classes; the config chooses the attention, the MLP and
the residual stream of every layer. Knows no request, no file and no other stage.

Dimensions: T tokens, R rows asked for, B blocks, H hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from stagecoach.config.model import LayerKind, ModelConfig, Taps
from stagecoach.kernels.ragged import StepTensors
from stagecoach.model.attn_residual import ResidualRead, ResidualStream
from stagecoach.model.kda import KdaLayer
from stagecoach.model.mla import MlaLayer
from stagecoach.model.moe import DenseMlp, MoeMlp
from stagecoach.model.norm import RmsNorm
from stagecoach.model.parallel_linear import (
    TensorParallel,
    VocabEmbedding,
    VocabHead,
    VocabShard,
)
from stagecoach.model.stage_memory import StageMemory
from stagecoach.model.weight_formats import PLAIN, WeightFormats
from stagecoach.model.weight_slots import WeightScope, WeightSlot
from stagecoach.pipeline.stage import Stage

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"

# Called with a layer's number and the stream right after that layer.
AfterLayer = Callable[[int, ResidualStream], None]


class DecoderLayer:
    """One attention and one MLP sublayer, each reading the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: WeightScope,
        tp: TensorParallel,
        *,
        taps_its_input: bool = False,
    ) -> None:
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        block_size = config.attn_res_block_size
        has_mixing = block_size is not None
        self.layer = layer
        self._taps_its_input = taps_its_input
        self._closes_block = block_size is not None and layer % block_size == 0
        self._attention_read = ResidualRead(
            weights, "self_attention_res", hidden_size, eps, has_mixing=has_mixing
        )
        self._attention_norm = RmsNorm(weights, "input_layernorm", hidden_size, eps)
        attention = KdaLayer if config.layer_kinds[layer] is LayerKind.KDA else MlaLayer
        self._attention = attention(config, weights.child("self_attn"), tp)
        self._mlp_read = ResidualRead(weights, "mlp_res", hidden_size, eps, has_mixing=has_mixing)
        self._mlp_norm = RmsNorm(weights, "post_attention_layernorm", hidden_size, eps)
        self._mlp = (
            MoeMlp(
                config,
                weights.child("block_sparse_moe"),
                tp,
                is_packed=layer in weights.formats.packed_layers,
            )
            if config.is_moe_layer[layer]
            else DenseMlp(config, weights.child("mlp"), tp)
        )

    def prepare(self) -> None:
        self._attention_read.prepare()
        self._mlp_read.prepare()
        if isinstance(self._mlp, MoeMlp):
            self._mlp.prepare()

    def __call__(self, stream: ResidualStream, step: StepTensors, memory: StageMemory) -> None:
        """Add the layer's two outputs to the stream."""
        if self._taps_its_input:
            stream.taps[self.layer - 1], x_TH = self._attention_read.both(
                stream, self._attention_norm
            )
        else:
            x_TH = self._attention_read.normed(stream, self._attention_norm)
        if self._closes_block:
            stream.close_block()
        stream.add(self._attention(x_TH, step, memory.layers[self.layer]))
        x_TH = self._mlp_read.normed(stream, self._mlp_norm)
        stream.add(self._mlp(x_TH, step))


class StageModel:
    """The layers of one stage on one rank, with the embedding or the head at the ends.

    A fresh one has NaN weights; `weights.load_stage` fills its slots and calls `prepare`.

    Args:
        dtype: of weights and activations. Norm statistics, gates, router, attention scores and
            recurrent state are at least float32 whatever it is.
        device: "meta" gives the slots without memory.
        taps: what a drafter reads; None without one. The forward leaves those that this stage
            makes in the stream, and the last stage holds the embedding too.
        formats: which matrices are quantised.
    """

    def __init__(
        self,
        config: ModelConfig,
        stage: Stage,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: str = "cpu",
        taps: Taps | None = None,
        formats: WeightFormats = PLAIN,
    ) -> None:
        assert stage.end <= config.num_layers, f"{stage} of {config.num_layers} layers"
        tap_ids = frozenset(taps.layers) if taps else frozenset()
        assert all(-1 <= tap < config.num_layers for tap in tap_ids), f"no such layer: {taps}"
        self.config = config
        self.stage = stage
        self.dtype = dtype
        self._scope = WeightScope(
            dtype, device=device, tp_rank=tp.rank, tp_size=tp.size, formats=formats
        )
        self._shards: dict[str, VocabShard] = {}
        self._prefix_taps = frozenset() if taps and taps.are_mixtures else tap_ids
        self._mixture_taps = tap_ids - self._prefix_taps
        self._embedding: VocabEmbedding | None = None
        if stage.is_first or (stage.is_last and taps is not None):
            self._embedding = VocabEmbedding(self._vocab_shard(EMBEDDING, is_embedding=True), tp)
        layers = self._scope.child("model.layers")
        self._layers = [
            DecoderLayer(
                config,
                layer,
                layers.child(str(layer)),
                tp,
                taps_its_input=layer - 1 in self._mixture_taps,
            )
            for layer in stage.layers
        ]
        if stage.is_last:
            self._bind_end(tp)
        self._scope.check_covered()

    @property
    def slots(self) -> list[WeightSlot]:
        """Every checkpoint tensor that this rank needs, with its place."""
        return self._scope.slots

    @property
    def num_parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._scope.parameters)

    @property
    def embedding(self) -> VocabEmbedding:
        """Of the first stage, and with a drafter of the last."""
        assert self._embedding is not None, f"no embedding on {self.stage}"
        return self._embedding

    @property
    def head(self) -> VocabHead:
        """Of the last stage; reads what the final norm made."""
        assert self.stage.is_last, "only the last stage has the head"
        return self._head

    @property
    def bank_capacity(self) -> int:
        """Closed blocks of the residual bank at the stage's end."""
        return self.config.num_closed_blocks(self.stage.end)

    def prepare(self) -> None:
        """Derive what the forward needs; once, after all slots are filled."""
        for layer in self._layers:
            layer.prepare()
        if self.stage.is_last:
            self._output_read.prepare()

    def embed(self, token_ids_T: Tensor) -> ResidualStream:
        """The stream before layer 0, on the first stage; int64 ids inside the vocabulary."""
        assert self.stage.is_first, "only the first stage embeds"
        stream = ResidualStream.from_embedding(self.embedding(token_ids_T), self.bank_capacity)
        if -1 in self._prefix_taps:
            stream.taps[-1] = stream.partial_TH
        return stream

    def resume(self, hidden_TH: Tensor, bank_TBH: Tensor | None = None) -> ResidualStream:
        """The stream as the stage before left it.

        Args:
            hidden_TH: the running sum after the layer before `stage.start`.
            bank_TBH: [T, ceil(start / block), H] closed blocks; None without mixing.
        """
        if bank_TBH is None:
            bank_TBH = hidden_TH.new_empty(len(hidden_TH), 0, hidden_TH.shape[1])
        expected = self.config.num_closed_blocks(self.stage.start)
        assert bank_TBH.shape[1] == expected, f"bank {tuple(bank_TBH.shape)}, {expected} blocks due"
        return ResidualStream(hidden_TH, bank_TBH, self.bank_capacity)

    def forward(
        self,
        stream: ResidualStream,
        step: StepTensors,
        memory: StageMemory,
        after_layer: AfterLayer | None = None,
    ) -> ResidualStream:
        """Run the stage's layers; `stream` is advanced in place and returned.

        Its `taps` then hold those of this stage. Values (behaviour of the DSpark drafts for
        Kimi-K3): without mixtures the running sum of the open block after layer k, -1 the
        embedding; with mixtures what the attention of layer k + 1 reads before its norm, or
        the final norm's input after the last layer.
        """
        for layer in self._layers:
            layer(stream, step, memory)
            if layer.layer in self._prefix_taps:
                stream.taps[layer.layer] = stream.partial_TH
            if after_layer is not None:
                after_layer(layer.layer, stream)
        if self.stage.is_last and self.stage.end - 1 in self._mixture_taps:
            stream.taps[self.stage.end - 1] = self._output_read(stream)
        return stream

    def logits(self, stream: ResidualStream, token_index_R: Tensor | None) -> Tensor:
        """Final mix, norm and head for chosen tokens of the flat axis, on the last stage.

        Args:
            token_index_R: int64; the same on every rank of the stage. None: all tokens.

        Returns:
            [R, vocab], at least float32, on every rank.
        """
        assert self.stage.is_last, "only the last stage has the head"
        if token_index_R is None:
            return self._head(self._output_read.normed(stream, self._output_norm))
        hidden_RH = self._output_read.normed_rows(
            stream.bank_TBH[token_index_R], stream.partial_TH[token_index_R], self._output_norm
        )
        return self._head(hidden_RH)

    def _bind_end(self, tp: TensorParallel) -> None:
        config, hidden_size = self.config, self.config.hidden_size
        weights = self._scope.child("model")
        self._output_read = ResidualRead(
            weights,
            "output_attn_res",
            hidden_size,
            config.rms_norm_eps,
            has_mixing=config.attn_res_block_size is not None,
        )
        self._output_norm = RmsNorm(weights, "norm", hidden_size, config.rms_norm_eps)
        name = EMBEDDING if config.tie_word_embeddings else HEAD
        self._head = VocabHead(self._vocab_shard(name, is_embedding=False), tp)

    def _vocab_shard(self, name: str, *, is_embedding: bool) -> VocabShard:
        """One copy a rank: a tied head on the first stage is the embedding's shard."""
        if name not in self._shards:
            sizes = (self.config.vocab_size, self.config.hidden_size)
            self._shards[name] = VocabShard(self._scope, name, sizes, is_embedding=is_embedding)
        return self._shards[name]
