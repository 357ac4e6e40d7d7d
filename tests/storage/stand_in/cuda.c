/* A stand-in for libcuda.so.1, with which the real kvikio runs its real file path on a machine without a GPU.
 *
 * Built by tests/storage/stand_in: gcc -O2 -Wall -Wextra -Werror -shared -fPIC -fvisibility=hidden -pthread
 *     -Wl,-soname,libcuda.so.1 cuda.c -o libcuda.so.1
 * Loaded by ctypes.CDLL before kvikio's first I/O: its dlopen("libcuda.so.1") then finds this one by its soname.
 * A child process finds it on LD_LIBRARY_PATH. kvikio has to be in compatibility mode: libcufile wants more of a
 * driver than is here.
 *
 * "Device memory" comes from stand_in_alloc() or cuMemAlloc(). Its address is reserved without access and the bytes
 * live in a second mapping, known to the copy functions only: a CPU that touches a device address gets SIGSEGV, and
 * read(2) and write(2) answer EFAULT, as with a GPU. Copies are queued on their stream and run when it, or an event
 * on it, is synchronised: a missing wait shows as wrong data. Calls that need a current context refuse to work
 * without one. Nothing here is a model of speed.
 *
 * STAND_IN_DEVICES=n in the environment, when it is loaded: how many devices there are (default 1, at most 8).
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The few types and numbers that are needed, so that no CUDA toolkit is. */
typedef int CUresult, CUdevice, CUpointer_attribute, CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef void CUmemcpyAttributes, CUctxCreateParams;
typedef void (*CUhostFn)(void *);
enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CU_POINTER_ATTRIBUTE_CONTEXT = 1, CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3, CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2,
};
#define API __attribute__((visibility("default")))
#define UNUSED(x) ((void)(x))
#define VERSION 13000 /* what cuDriverGetVersion answers: CUDA 13.0 */

/* ---- devices, contexts (one primary context a device) and the per-thread stack ---- */
struct CUctx_st { int ordinal; };
static struct CUctx_st contexts[8];
static int n_devices = 1;
static _Thread_local CUcontext ctx_stack[64];
static _Thread_local int ctx_depth;

static CUcontext current(void) { return ctx_depth ? ctx_stack[ctx_depth - 1] : NULL; }
#define NEED_CONTEXT() do { if (!current()) return CUDA_ERROR_INVALID_CONTEXT; } while (0)

__attribute__((constructor)) static void setup(void)
{
    const char *n = getenv("STAND_IN_DEVICES");
    if (n && atoi(n) >= 1 && atoi(n) <= 8) n_devices = atoi(n);
    for (int i = 0; i < 8; i++) contexts[i].ordinal = i;
}

/* ---- known ranges: device allocations, and pinned or registered host memory ---- */
struct range {
    uintptr_t base; size_t size, mapped; char *shadow; int device, ordinal; struct range *next;
    unsigned long long id; /* never reused, unlike the address */
};
static struct range *ranges;
static unsigned long long last_id;
static pthread_rwlock_t ranges_lock = PTHREAD_RWLOCK_INITIALIZER;

static struct range *lookup(uintptr_t p) /* call with ranges_lock held */
{
    for (struct range *r = ranges; r; r = r->next)
        if (p >= r->base && p - r->base < r->size) return r;
    return NULL;
}
static int find(uintptr_t p, struct range *out)
{
    pthread_rwlock_rdlock(&ranges_lock);
    struct range *r = lookup(p);
    if (r) *out = *r;
    pthread_rwlock_unlock(&ranges_lock);
    return r != NULL;
}
static void add(struct range r)
{
    struct range *n = malloc(sizeof *n);
    *n = r;
    pthread_rwlock_wrlock(&ranges_lock);
    n->id = ++last_id;
    n->next = ranges;
    ranges = n;
    pthread_rwlock_unlock(&ranges_lock);
}
static int take(uintptr_t base, int device, struct range *out)
{
    int found = 0;
    pthread_rwlock_wrlock(&ranges_lock);
    for (struct range **at = &ranges; *at; at = &(*at)->next)
        if ((*at)->base == base && (*at)->device == device) {
            struct range *r = *at;
            *out = *r, *at = r->next, found = 1;
            free(r);
            break;
        }
    pthread_rwlock_unlock(&ranges_lock);
    return found;
}

/* ---- helpers for tests ---- */
enum { BYTES_TO_DEVICE, BYTES_FROM_DEVICE, BYTES_OTHER, N_COPIES, N_SYNCS, N_PINNED, N_STATS };
static uint64_t stats[N_STATS];
#define COUNT(i, n) __atomic_fetch_add(&stats[i], (n), __ATOMIC_RELAXED)

API void stand_in_stats(uint64_t out[N_STATS], int reset)
{
    for (int i = 0; i < N_STATS; i++)
        out[i] = reset ? __atomic_exchange_n(&stats[i], 0, __ATOMIC_RELAXED) : stats[i];
}

/* Make the (after+1)-th copy (what=0) or pinned allocation (what=1) from now fail once. */
static struct { long left; int code; } faults[2] = {{-1, 0}, {-1, 0}};
API void stand_in_fail(int what, long after, int code)
{
    faults[what & 1].code = code;
    __atomic_store_n(&faults[what & 1].left, after, __ATOMIC_SEQ_CST);
}
static CUresult fault(int what)
{
    long n = __atomic_load_n(&faults[what].left, __ATOMIC_SEQ_CST);
    if (n < 0) return CUDA_SUCCESS;
    return __atomic_fetch_sub(&faults[what].left, 1, __ATOMIC_SEQ_CST) == 0
               ? (CUresult)faults[what].code : CUDA_SUCCESS;
}

/* A device allocation: its address, or NULL. A bare page follows it, as a guard. */
API void *stand_in_alloc(size_t size, int ordinal)
{
    size_t page = sysconf(_SC_PAGESIZE), n = (size + page - 1) / page * page;
    if (!size || ordinal < 0 || ordinal >= n_devices) return NULL;
    char *base = mmap(NULL, n + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return NULL;
    char *shadow = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (shadow == MAP_FAILED) { munmap(base, n + page); return NULL; }
    add((struct range){(uintptr_t)base, size, n, shadow, 1, ordinal, NULL, 0});
    return base;
}
API int stand_in_free(void *p)
{
    struct range r;
    if (!take((uintptr_t)p, 1, &r)) return -1;
    munmap(r.shadow, r.mapped);
    return munmap(p, r.mapped + sysconf(_SC_PAGESIZE));
}
/* Where the CPU may read and write the bytes behind a device address. */
API void *stand_in_view(void *p)
{
    struct range r;
    return find((uintptr_t)p, &r) && r.device ? r.shadow + ((uintptr_t)p - r.base) : NULL;
}
API void stand_in_set_current(int ordinal) /* ordinal < 0: none, as in a fresh thread */
{
    ctx_depth = 0;
    if (ordinal >= 0 && ordinal < n_devices) ctx_stack[ctx_depth++] = &contexts[ordinal];
}

/* ---- streams: a queue of copies and host functions ---- */
struct op { void *dst; const void *src; size_t n; CUhostFn fn; void *arg; struct op *next; };
struct CUstream_st { pthread_mutex_t lock; struct op *head, **tail; };
struct CUevent_st { CUstream on; };
static struct CUstream_st null_stream = {PTHREAD_MUTEX_INITIALIZER, NULL, &null_stream.head};

static CUresult enqueue(CUstream s, struct op o)
{
    struct op *n = malloc(sizeof *n);
    if (!n) return CUDA_ERROR_OUT_OF_MEMORY;
    *n = o, n->next = NULL;
    if (!s) s = &null_stream;
    pthread_mutex_lock(&s->lock);
    *s->tail = n, s->tail = &n->next;
    pthread_mutex_unlock(&s->lock);
    return CUDA_SUCCESS;
}
static void drain(CUstream s)
{
    if (!s) s = &null_stream;
    pthread_mutex_lock(&s->lock);
    for (struct op *o; (o = s->head);) {
        if (o->fn) o->fn(o->arg);
        else memcpy(o->dst, o->src, o->n);
        if (!(s->head = o->next)) s->tail = &s->head;
        free(o);
    }
    pthread_mutex_unlock(&s->lock);
    COUNT(N_SYNCS, 1);
}

/* Turn an address into one the CPU may use; sets *device; refuses to leave a range. */
static char *translate(CUdeviceptr p, size_t n, int *device)
{
    struct range r;
    *device = 0;
    if (!find((uintptr_t)p, &r) || !r.device) return (char *)(uintptr_t)p;
    *device = 1;
    size_t at = (uintptr_t)p - r.base;
    return n <= r.size - at ? r.shadow + at : NULL;
}
static CUresult copy(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
    int to, from;
    NEED_CONTEXT();
    CUresult e = fault(0);
    if (e) return e;
    char *d = translate(dst, n, &to), *c = translate(src, n, &from);
    if (!d || !c) return CUDA_ERROR_INVALID_VALUE;
    COUNT(to == from ? BYTES_OTHER : to ? BYTES_TO_DEVICE : BYTES_FROM_DEVICE, n);
    COUNT(N_COPIES, 1);
    return n ? enqueue(s, (struct op){.dst = d, .src = c, .n = n}) : CUDA_SUCCESS;
}

/* ---- the driver API: as much of it as KvikIO looks up ---- */
API CUresult cuInit(unsigned flags) { UNUSED(flags); return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *v) { *v = VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = n_devices; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *d, int ordinal)
{
    if (ordinal < 0 || ordinal >= n_devices) return CUDA_ERROR_INVALID_DEVICE;
    *d = ordinal;
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d)
{
    UNUSED(a), UNUSED(d), *v = 0; /* offers no optional feature */
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
    if (d < 0 || d >= n_devices) return CUDA_ERROR_INVALID_DEVICE;
    *c = &contexts[d];
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { UNUSED(d); return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext c)
{
    if (!c || ctx_depth == 64) return CUDA_ERROR_INVALID_CONTEXT;
    ctx_stack[ctx_depth++] = c;
    return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent_v2(CUcontext *c)
{
    NEED_CONTEXT();
    ctx_depth--;
    if (c) *c = ctx_stack[ctx_depth];
    return CUDA_SUCCESS;
}
API CUresult cuCtxCreate_v4(CUcontext *c, CUctxCreateParams *params, unsigned flags, CUdevice d)
{
    UNUSED(params), UNUSED(flags);
    CUresult e = cuDevicePrimaryCtxRetain(c, d);
    return e ? e : cuCtxPushCurrent_v2(*c);
}
API CUresult cuCtxDestroy_v2(CUcontext c) { UNUSED(c); return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = current(); return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *d)
{
    NEED_CONTEXT();
    *d = current()->ordinal;
    return CUDA_SUCCESS;
}

static CUresult attribute(void *out, CUpointer_attribute a, CUdeviceptr p)
{
    struct range r;
    int known = find((uintptr_t)p, &r), device = known && r.device;
    switch ((int)a) { /* an unknown pointer: INVALID_VALUE, with the value zeroed */
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = device ? CU_MEMORYTYPE_DEVICE : known ? CU_MEMORYTYPE_HOST : 0;
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)out = device ? &contexts[r.ordinal] : NULL;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = known ? p : 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = device ? r.ordinal : 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = known ? r.id : 0; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned char *)out = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p)
{
    return attribute(out, a, p);
}
API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **out, CUdeviceptr p)
{
    for (unsigned i = 0; i < n; i++) attribute(out[i], a[i], p);
    return CUDA_SUCCESS; /* the plural form succeeds, with zeros, for unknown pointers */
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
    struct range r;
    if (!find((uintptr_t)p, &r) || !r.device) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = r.base;
    if (size) *size = r.size;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
    NEED_CONTEXT();
    *p = (uintptr_t)stand_in_alloc(n, current()->ordinal);
    return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
static CUresult copy_now(CUdeviceptr d, CUdeviceptr s, size_t n)
{
    CUresult e = copy(d, s, n, NULL);
    if (!e) drain(NULL);
    return e;
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr d, const void *s, size_t n) { return copy_now(d, (uintptr_t)s, n); }
API CUresult cuMemcpyDtoH_v2(void *d, CUdeviceptr s, size_t n) { return copy_now((uintptr_t)d, s, n); }

API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
    UNUSED(flags);
    NEED_CONTEXT();
    CUresult e = fault(1);
    if (e) return e;
    char *block = NULL; /* 256 bytes past a page: real pinned memory promises no page alignment */
    if (posix_memalign((void **)&block, 4096, n + 256)) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = block + 256;
    add((struct range){(uintptr_t)*p, n, 0, block, 0, 0, NULL, 0});
    COUNT(N_PINNED, 1);
    return CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void *p)
{
    struct range r;
    if (!take((uintptr_t)p, 0, &r) || !r.shadow) return CUDA_ERROR_INVALID_VALUE;
    free(r.shadow);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
    struct range r;
    UNUSED(flags);
    NEED_CONTEXT();
    CUresult e = fault(1);
    if (e) return e;
    if (find((uintptr_t)p, &r)) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    add((struct range){(uintptr_t)p, n, 0, NULL, 0, 0, NULL, 0});
    COUNT(N_PINNED, 1);
    return CUDA_SUCCESS;
}
API CUresult cuMemHostUnregister(void *p)
{
    struct range r;
    return take((uintptr_t)p, 0, &r) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

API CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, CUstream st)
{
    return copy(d, s, n, st);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, const void *s, size_t n, CUstream st)
{
    return copy(d, (uintptr_t)s, n, st);
}
API CUresult cuMemcpyDtoHAsync_v2(void *d, CUdeviceptr s, size_t n, CUstream st)
{
    return copy((uintptr_t)d, s, n, st);
}
API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *d, CUdeviceptr *s, size_t *n, size_t count,
                                   CUmemcpyAttributes *a, size_t *ai, size_t na, CUstream st)
{
    UNUSED(a), UNUSED(ai), UNUSED(na);
    CUresult e = st ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; /* not for the default stream */
    for (size_t i = 0; !e && i < count; i++) e = copy(d[i], s[i], n[i], st);
    return e;
}

API CUresult cuStreamCreate(CUstream *s, unsigned flags)
{
    UNUSED(flags);
    NEED_CONTEXT();
    *s = calloc(1, sizeof **s);
    pthread_mutex_init(&(*s)->lock, NULL);
    (*s)->tail = &(*s)->head;
    return CUDA_SUCCESS;
}
API CUresult cuStreamSynchronize(CUstream s) { NEED_CONTEXT(); drain(s); return CUDA_SUCCESS; }
API CUresult cuStreamDestroy_v2(CUstream s) { drain(s); free(s); return CUDA_SUCCESS; }
API CUresult cuLaunchHostFunc(CUstream s, CUhostFn fn, void *arg)
{
    return enqueue(s, (struct op){.fn = fn, .arg = arg});
}
API CUresult cuEventCreate(CUevent *e, unsigned flags)
{
    UNUSED(flags);
    NEED_CONTEXT();
    *e = calloc(1, sizeof **e);
    return CUDA_SUCCESS;
}
API CUresult cuEventRecord(CUevent e, CUstream s) { e->on = s; return CUDA_SUCCESS; }
API CUresult cuEventSynchronize(CUevent e) { drain(e->on); return CUDA_SUCCESS; }
API CUresult cuEventQuery(CUevent e) { drain(e->on); return CUDA_SUCCESS; }
API CUresult cuEventDestroy_v2(CUevent e) { free(e); return CUDA_SUCCESS; }

API CUresult cuGetErrorName(CUresult e, const char **s)
{
    switch ((int)e) {
    case CUDA_SUCCESS: *s = "CUDA_SUCCESS"; break;
    case CUDA_ERROR_INVALID_VALUE: *s = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *s = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_INVALID_DEVICE: *s = "CUDA_ERROR_INVALID_DEVICE"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *s = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: *s = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    default: *s = "CUDA_ERROR_OTHER"; break;
    }
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult e, const char **s)
{
    UNUSED(e), *s = "from the stand-in";
    return CUDA_SUCCESS;
}
