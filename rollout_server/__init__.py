"""The rollout server: FastAPI around one vLLM engine, with weights that can be replaced in memory."""
