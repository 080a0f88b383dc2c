"""DataProto: what flows between the nodes of a dataflow.

Rows of tensors (``batch``), rows of Python objects (``non_tensor_batch``) and values about the whole batch
(``meta_info``).

- ``dataproto.py``  the class (``item.py``: one row of it)
- ``convert.py``    making, checking and showing the parts
- ``rows.py``       concatenate, cut, pad, fold, join
- ``columns.py``    merging and comparing columns
- ``future.py``     a DataProto that is still being computed
- ``serialize.py``, ``storage.py``  between processes, and on disk
"""

from verl.protocol.columns import object_column, union_numpy_dict, union_tensor_dict
from verl.protocol.dataproto import BatchData, DataProto, collate_fn
from verl.protocol.future import DataProtoFuture
from verl.protocol.item import DataProtoConfig, DataProtoItem
from verl.protocol.rows import (
    PAD_ID_PREFIX,
    fold_batch_dim,
    mark_padding_rows,
    pad_dataproto_to_divisor,
    pad_to_common_width,
    padding_rows,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.protocol.serialize import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "PAD_ID_PREFIX",
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "mark_padding_rows",
    "object_column",
    "pad_dataproto_to_divisor",
    "pad_to_common_width",
    "padding_rows",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
