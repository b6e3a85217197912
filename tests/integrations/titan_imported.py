"""torchtitan as ranks on CPUs need it, imported once by the servers that they fork from."""

from tests.integrations.titan_runs import prepare

prepare()
