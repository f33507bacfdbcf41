"""To be imported first by a benchmark that runs an engine in its own process: memory as of an engine that serves."""

from pagemill.engine.interpreter_memory import gather

gather()
