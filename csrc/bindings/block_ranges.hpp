// BlockRanges: an immutable list of block ranges for Python, the currency of all calls.
#pragma once

#include "bindings/py_util.hpp"
#include "tagma/block_range.hpp"

namespace tagma::py {

// A new BlockRanges that owns `ranges`; the shared empty one if there are none. `layout` says when
// a prefix hit was looked up: how many blocks had moved by then.
PyObject* new_block_ranges(RangeList&& ranges, int64_t layout = -1);

// The layout it was made with, or -1.
int64_t layout_of(PyObject* object);

// The ranges of a BlockRanges object. Sets TypeError and throws PythonError for anything else.
const RangeList& ranges_of(PyObject* object);

}  // namespace tagma::py

int add_block_ranges(PyObject* module);
