"""What tests share, and the tools that run and check the suite, with their tests."""
