"""Training data: readers, tokenizing, token files, mixtures, batches; the position in the data is one integer."""

from dwindle.data.batches import BatchStream
from dwindle.data.config import DataConfig, SourceConfig, check_inputs
from dwindle.data.mixture import Mixture, PackedDataset
from dwindle.data.readers import read_documents
from dwindle.data.text_windows import calibration_windows, validation_windows
from dwindle.data.token_files import TokenFiles, open_token_files, write_token_files
from dwindle.data.token_stream import TokenStream
from dwindle.data.tokenizing import DocumentEncoder, tokenizer_fingerprint
from dwindle.data.training_data import TrainingData, open_stream, open_training_data, refuse_shared_text

__all__ = [
    "BatchStream",
    "DataConfig",
    "DocumentEncoder",
    "Mixture",
    "PackedDataset",
    "SourceConfig",
    "TokenFiles",
    "TokenStream",
    "TrainingData",
    "calibration_windows",
    "check_inputs",
    "open_stream",
    "open_token_files",
    "open_training_data",
    "read_documents",
    "refuse_shared_text",
    "tokenizer_fingerprint",
    "validation_windows",
    "write_token_files",
]
