"""Writes a Whisper vocabulary as the two OpenVINO graphs that openvino-genai's pipelines load."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
from openvino_tokenizers.constants import UTF8ReplaceMode
from openvino_tokenizers.tokenizer_pipeline import (
    BPETokenizationStep,
    CombineSegmentsStep,
    FuseStep,
    PaddingStep,
    RegexSplitStep,
    Sequence,
    SpecialToken,
    SpecialTokensSplit,
    TokenizerPipeline,
    TruncationStep,
    UTF8ValidateStep,
    VocabDecoderStep,
)
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

from worker_node.models.conversion.whisper.vocabulary import Vocabulary

_LONGEST = 1024
_END = "<|endoftext|>"


def write_tokenizer_models(vocabulary: Vocabulary, target: Path) -> None:
    """Write `openvino_tokenizer.xml` and `openvino_detokenizer.xml`, which skips special tokens."""
    special = [SpecialToken(text) for text in vocabulary.special]
    pipeline = TokenizerPipeline()
    pipeline.add_steps(
        [
            SpecialTokensSplit(special),
            RegexSplitStep.byte_level_splitter(),
            BPETokenizationStep(vocab=list(vocabulary.tokens), merges=list(vocabulary.merges)),
            TruncationStep(max_length=_LONGEST),
            CombineSegmentsStep(inputs=[Sequence()]),
            PaddingStep(_END, _token_id=vocabulary.end),
            VocabDecoderStep(vocab=list(vocabulary.tokens), skip_tokens=sorted(vocabulary.special.values())),
            FuseStep(),
            UTF8ValidateStep(mode=UTF8ReplaceMode.REPLACE),
        ]
    )
    tokenizer, detokenizer = pipeline.get_tokenizer_ov_subgraph(), pipeline.get_detokenizer_ov_subgraph()
    tokenizer.outputs[0].add_names({"input_ids"})
    tokenizer.outputs[1].add_names({"attention_mask"})
    # GenAI reads token ids as i64; left as i32 it raises ParameterMismatch.
    tokenizer = change_outputs_type(tokenizer, ov.Type.i64)
    detokenizer = change_inputs_type(detokenizer, ov.Type.i64)
    for model in (tokenizer, detokenizer):
        model.set_rt_info(vocabulary.end, "eos_token_id")
        model.set_rt_info(vocabulary.end, "pad_token_id")
    ov.save_model(tokenizer, target / "openvino_tokenizer.xml")
    ov.save_model(detokenizer, target / "openvino_detokenizer.xml")
