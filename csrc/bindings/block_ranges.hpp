// BlockRanges: an immutable list of block ranges for Python, the currency of all calls.
#pragma once

#include "bindings/py_util.hpp"
#include "tagma/block_range.hpp"

namespace tagma::py {

// A new BlockRanges that owns `ranges`; the shared empty one if there are none.
PyObject* new_block_ranges(RangeList&& ranges);

// The ranges of a BlockRanges object. Sets TypeError and throws PythonError for anything else.
const RangeList& ranges_of(PyObject* object);

}  // namespace tagma::py

int add_block_ranges(PyObject* module);
