// GSPO_CLONES compiles a function once per instruction set; the dynamic loader picks the best one that the
// machine has.
//
// target_clones needs the GNU loader's indirect functions; x86-64-v3 and v4 are known as dispatch targets
// since GCC 12. GSPO_ONE_CLONE compiles only for -march, so that each set can be tested by itself.
#pragma once

#include <cstdlib>  // defines __GLIBC__

#if defined(GSPO_ONE_CLONE)
#define GSPO_CLONES
#elif defined(__x86_64__) && defined(__ELF__) && defined(__GLIBC__) && defined(__GNUC__) && \
    !defined(__clang__) && __GNUC__ >= 12
#define GSPO_HAS_CLONES
#define GSPO_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define GSPO_CLONES
#endif
