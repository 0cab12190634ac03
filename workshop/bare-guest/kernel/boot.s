/* From the boot loader to Rust: 64-bit code, with only the lower 4 GiB of memory
   mapped, at their own addresses. */

.set MAGIC, 0x1badb002
.set FLAGS, 0x00010002              /* memory size wanted; addresses below */

.section .multiboot, "a"
.balign 4
header:
    .long MAGIC, FLAGS, -(MAGIC + FLAGS)
    .long header, image_start, image_end, bss_end, start

.text
.code32
.globl start
start:
    movl $stack_end, %esi
    movl %ebx, %edi                 /* the loader's information */
    movl $boot, %ebp

/* Enters 64-bit code at %ebp, with the stack %esi and the argument %edi. */
enter_long_mode:
    movl $tables, %eax
    movl %eax, %cr3
    movl %cr4, %eax
    orl $0x20, %eax                 /* PAE */
    movl %eax, %cr4
    movl $0xc0000080, %ecx          /* EFER: LME */
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    orl $0x80000001, %eax           /* PG, PE */
    movl %eax, %cr0
    lgdt gdt_pointer
    ljmp $0x08, $long_mode

.code64
long_mode:
    movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl %esi, %esp
    movl %edi, %edi
    movl %ebp, %eax
    call *%rax
    ud2

/* The second CPU begins here, in real mode, at SECOND_AT. */
.section .rodata
.code16
.balign 16
.globl second_begin, second_end
second_begin:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl (second_gdt - second_begin + 0x8000)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x18, $second_protected
second_gdt:
    .word 31
    .long gdt
second_end:

.text
.code32
second_protected:
    movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl $second_stack_end, %esi
    movl $second, %ebp
    jmp enter_long_mode

.code64
/* An interrupt only ends a halt. */
.globl timer_interrupt
timer_interrupt:
    pushq %rax
    movl $0xfee000b0, %eax          /* the local APIC's EOI */
    movl $0, (%rax)
    popq %rax
.globl spurious_interrupt
spurious_interrupt:
    iretq

/* Exceptions: sixteen bytes each. */
.balign 16
.globl exceptions
exceptions:
.set number, 0
.rept 32
    .balign 16
    pushq $number
    jmp exception
    .set number, number + 1
.endr
exception:
    popq %rdi
    movq %rsp, %rsi
    andq $-16, %rsp
    call die_of_exception
    ud2

.data
.balign 8
gdt:
    .quad 0
    .quad 0x00af9a000000ffff        /* 0x08: 64-bit code */
    .quad 0x00cf92000000ffff        /* 0x10: data */
    .quad 0x00cf9a000000ffff        /* 0x18: 32-bit code */
gdt_pointer:
    .word 31
    .long gdt

/* 4 GiB in pages of 2 MiB: present, writable, and uncached above 3 GiB, where the
   local APIC is. */
.balign 4096
tables:
    .quad directories + 3
    .fill 511, 8, 0
directories:
    .quad directory + 0x0003, directory + 0x1003, directory + 0x2003, directory + 0x3003
    .fill 508, 8, 0
directory:
.set address, 0
.rept 1536
    .quad address + 0x83
    .set address, address + 0x200000
.endr
.rept 512
    .quad address + 0x9b
    .set address, address + 0x200000
.endr

.bss
.balign 4096
    .skip 16384
stack_end:
    .skip 16384
second_stack_end:
