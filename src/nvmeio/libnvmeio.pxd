"""The C library as Cython sees it: the headers of nvmeio without their prefix.

A module that cimports this links ``libnvmeio``, as ``nvmeio.get_library_dir()`` and
``nvmeio.pc`` say, and shares the copy that the package has loaded.  The package's own
modules cimport one header each, so that a change of one rebuilds only what uses it.
"""

from nvmeio._libnvmeio.c_base cimport *
from nvmeio._libnvmeio.c_file cimport *
from nvmeio._libnvmeio.c_request cimport *
from nvmeio._libnvmeio.c_gather cimport *
from nvmeio._libnvmeio.c_handle cimport *
from nvmeio._libnvmeio.c_pool cimport *
from nvmeio._libnvmeio.c_copy cimport *
from nvmeio._libnvmeio.c_system cimport *
