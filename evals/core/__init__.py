"""CORE, the metric of DCLM and nanochat."""
