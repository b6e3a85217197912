"""torchtitan as ranks on CPUs need it, imported once by the servers that they fork from."""

from importlib import import_module

from tests.integrations.titan_runs import SPECS, V03, parsed, prepare

prepare()
import_module(SPECS)
if not V03:  # whose command line names a job first
    parsed(["--job.custom_config_module", "moecore.integrations.torchtitan.options"])
