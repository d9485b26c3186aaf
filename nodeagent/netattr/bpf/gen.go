package bpf

//go:generate go tool -modfile=../../../tools/go.mod bpf2go -cc clang-14 -strip llvm-strip-14 -target bpfel -no-global-types -type key -type counts -type sock_state -type range -go-package bpf -cflags "-O2 -g -Wall -Werror -mcpu=v3" netattr c/netattr.bpf.c
