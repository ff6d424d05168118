"""Heart disease in four hospitals (Janosi, Steinbrunn, Pfisterer & Detrano 1988; UCI repository, CC BY 4.0)."""

from importlib import resources

import numpy as np
import pandas as pd

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"),
)
NEVER_ZERO = ["trestbps", "chol"]  # of a living patient: 0 stands for missing


def heart_disease() -> dict[str, pd.DataFrame]:
    """Load the patients of the four hospitals: a natural federation.

    The silos are `cleveland` (303 patients, 139 with the disease), `hungarian` (Budapest: 294, 106), `switzerland`
    (Zurich and Basel: 123, 115) and `va` (Long Beach: 200, 149). Columns:

    - `age`: years.
    - `sex`: 1 male, 0 female.
    - `cp`: chest pain, 1 typical angina, 2 atypical angina, 3 other pain, 4 asymptomatic.
    - `trestbps`: resting blood pressure at admission, mm Hg.
    - `chol`: serum cholesterol, mg/dl.
    - `fbs`: fasting blood sugar above 120 mg/dl, 1 yes, 0 no.
    - `restecg`: resting ECG, 0 normal, 1 ST-T wave abnormality, 2 left ventricular hypertrophy.
    - `thalach`: highest heart rate reached.
    - `exang`: angina from exercise, 1 yes, 0 no.
    - `oldpeak`: ST depression by exercise relative to rest (negative: elevation).
    - `slope`: of the ST segment at peak exercise, 1 up, 2 flat, 3 down.
    - `ca`: major vessels colored by fluoroscopy, 0 to 3.
    - `thal`: thallium scan, 3 normal, 6 fixed defect, 7 reversible defect.
    - `disease`: the outcome, 1 if a major vessel is narrowed by more than half: `num > 0` in the files. (Their grades
      1 to 4 cannot be compared: Budapest's file has only 0 and 1.)

    What is missing is NaN: the files' `?`, and the zeros that stand for it, which are `chol` of all 123 Swiss and of 49
    patients in `va`, and one `trestbps` there. Hence `chol` is never known in Switzerland; outside Cleveland `ca` is
    hardly ever known, `slope` and `thal` often not. Choose columns and drop or impute before fitting: without `chol`,
    `slope`, `ca` and `thal` 303, 284, 46 and 133 patients are complete. Studies that use `chol` and count its zeros as
    values (without `slope`, `ca` and `thal`) have 303, 261, 46 and 130.

    Publications should name the investigators: Andras Janosi (Budapest), William Steinbrunn (Zurich), Matthias
    Pfisterer (Basel), Robert Detrano (Long Beach and Cleveland).

    Returns:
        A data frame by silo, one row a patient: `disease` whole numbers, all else floats.
    """
    folder = resources.files("sfvi.data") / "files" / "heart_disease"
    silos = {}
    for hospital in HOSPITALS:
        with (folder / f"processed.{hospital}.data").open() as file:
            frame = pd.read_csv(file, header=None, names=COLUMNS, na_values="?", dtype=np.float64)
        frame[NEVER_ZERO] = frame[NEVER_ZERO].replace(0.0, np.nan)
        frame["disease"] = (frame.pop("num") > 0).astype(np.int32)
        silos[hospital] = frame
    return silos
