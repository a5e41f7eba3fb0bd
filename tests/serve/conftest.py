import pytest
from running_server import run_server
from scripted_engine import ScriptedEngine


@pytest.fixture(scope="session")
def server():
    """Shared by every test that leaves it idle."""
    with run_server(ScriptedEngine()) as running:
        yield running
        assert not running.engine.running
