"""CUDA graphs by relaunch: a region is captured once, and its graph is launched again on other memory."""
