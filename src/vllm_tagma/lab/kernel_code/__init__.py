"""What compilers say about the kernels without a card: ours and vLLM's, compiled for GPUs.

``specs.py`` names kernels and what they are launched with, ``assembly.py`` compiles and reads the
assembler, ``code_report.py`` writes the table. Static findings: code, not time.
"""
