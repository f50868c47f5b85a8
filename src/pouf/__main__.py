from pouf.cli import main

main()
